//! Checkpoints that are folders: those of `torch.distributed.checkpoint`, and safetensors shards, which ranks save
//! together, here a single one. `by_name` resumes training from the former in Python and from Python's, and what concerns
//! the folders alone is tested in `torch-files`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder, Format, MetricGoal, Rng};
use tch_amp::distributed::{ProcessGroup, Store};
use tch_amp::optim::{Muon, Sgd};
use tch_amp::{GradScaler, Result};

use torch_files::distributed::{FolderKind, ShardWriter, SharedSave};
use torch_files::{Dtype, Limits, Writer};

use crate::checkpoint::round_trip::same;
use crate::checkpoint::{Run, checkpoint_error};
use testkit::files::{Folder, names_in};
use testkit::handmade::manifest;

/// The folders of a format.
#[derive(Clone, Copy)]
pub(crate) struct Folders {
    pub(crate) format: Format,
    pub(crate) ending: &'static str,
    index: &'static str,
    file: &'static str,
}

const DCP: Folders =
    Folders { format: Format::Dcp, ending: "dcp", index: ".metadata", file: "__0_0.distcp" };
const SHARDS: Folders = Folders {
    format: Format::Safetensors,
    ending: "shards",
    index: "model.safetensors.index.json",
    file: "shard-00001-model-00001-of-00001.safetensors",
};
pub(crate) const KINDS: [Folders; 2] = [DCP, SHARDS];

impl Folders {
    /// An empty checkpoint that is saved as such a folder.
    pub(crate) fn checkpoint(self) -> Checkpoint {
        if self.format == Format::Dcp {
            return Checkpoint::new();
        }
        let group = ProcessGroup::new(&Store::in_process().unwrap(), 0, 1);
        Checkpoint::sharded(&group.unwrap())
    }

    /// A checkpoint of everything in a run.
    fn of(self, run: &mut Run) -> Checkpoint {
        let mut checkpoint = self.checkpoint();
        run.add_to(&mut checkpoint);
        checkpoint
    }
}

#[test]
fn a_run_resumes_from_a_folder() -> Result<()> {
    for kind in KINDS {
        let folder = Folder::new();
        let path = folder.file("run.dcp");
        let mut run = Run::new(Device::Cpu);
        run.train(3);
        kind.of(&mut run).save_as(&path, kind.format)?;
        assert_eq!(names_in(&path), [kind.index, kind.file]);
        let saved = run.fingerprint();
        run.train(2);
        run.restore(&Checkpoint::load(&path)?)?;
        assert_eq!(run.fingerprint(), saved);
        // Another save replaces it, also one in the same process that has it open.
        let before = Checkpoint::load(&path)?;
        run.train(1);
        kind.of(&mut run).save_as(&path, kind.format)?;
        let after = run.fingerprint();
        run.restore(&before)?;
        assert_eq!(run.fingerprint(), saved);
        run.restore(&Checkpoint::load(&path)?)?;
        assert_eq!(run.fingerprint(), after);
        // What was loaded can be saved again, in any format.
        for (from, to, format) in [
            ("run.dcp", "a.pt", Format::Torch),
            ("a.pt", "b.dcp", Format::Dcp),
            ("b.dcp", "c.safetensors", Format::Safetensors),
            ("c.safetensors", "d.dcp", Format::Dcp),
        ] {
            Checkpoint::load(folder.file(from))?.save_as(folder.file(to), format)?;
            run.train(1);
            run.restore(&Checkpoint::load(folder.file(to))?)?;
            assert_eq!(run.fingerprint(), after, "{from} to {to}");
        }
    }
    Ok(())
}

/// Every kind of part, and what a flat list of names could lose: empty maps, lists of maps, and non-finite numbers.
#[test]
fn every_part_is_read_as_it_was_saved() -> Result<()> {
    for kind in KINDS {
        let folder = Folder::new();
        let path = folder.file("run.dcp");
        let mut checkpoint = kind.checkpoint();
        let tensors = [
            ("bf16", Tensor::from_slice(&[1.5f32, f32::NAN]).to_kind(Kind::BFloat16)),
            ("half", Tensor::from_slice(&[f32::INFINITY]).to_kind(Kind::Half)),
            ("transposed", Tensor::randn([3, 5], (Kind::Float, Device::Cpu)).tr()),
            ("number", Tensor::from(7i64)),
            ("empty", Tensor::zeros([0, 4], (Kind::Float, Device::Cpu))),
            ("complex", Tensor::randn([2], (Kind::ComplexFloat, Device::Cpu))),
            ("bool", Tensor::from_slice(&[true, false])),
            ("large", Tensor::randn([300, 301], (Kind::Float, Device::Cpu))),
        ];
        for (name, tensor) in &tensors {
            checkpoint.add_tensor(name, tensor)?;
        }
        let values = serde_json::json!({
            "a.b": {"c": [1, {"d": {}, "e": []}, [[], {"f": null}]]},
            "n": [0.1, true, "täst", u64::MAX, i64::MIN],
            "nothing": {},
        });
        checkpoint.add_value("values", &values)?;
        checkpoint.add_value("none", &Option::<u8>::None)?;
        checkpoint.add_value("empty map", &BTreeMap::<String, u8>::new())?;
        checkpoint.add_value("floats", &[f64::INFINITY, -0.0, 1e-300])?;
        checkpoint.add("disabled", &mut GradScaler::disabled())?;
        checkpoint.add("rng", Rng(Device::Cpu))?;
        checkpoint.save_as(&path, kind.format)?;
        let loaded = Checkpoint::load(&path)?;
        assert_eq!(loaded.names().collect::<Vec<_>>(), checkpoint.names().collect::<Vec<_>>());
        for (name, tensor) in &tensors {
            // The bits, since a NaN is not equal to itself.
            assert!(same(&loaded.tensor(name)?, tensor), "{name}");
        }
        assert_eq!(loaded.value::<serde_json::Value>("values")?, values);
        assert_eq!(loaded.value::<Option<u8>>("none")?, None);
        assert!(loaded.value::<BTreeMap<String, u8>>("empty map")?.is_empty());
        let floats: Vec<f64> = loaded.value("floats")?;
        assert_eq!(
            floats.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
            [f64::INFINITY.to_bits(), (-0.0f64).to_bits(), 1e-300f64.to_bits()]
        );
        let restore = loaded.restore().add("rng", Rng(Device::Cpu));
        restore.add("disabled", &mut GradScaler::disabled()).apply()?;
    }
    Ok(())
}

#[test]
fn optimizers_of_every_kind_are_read_again() -> Result<()> {
    for kind in KINDS {
        let folder = Folder::new();
        let path = folder.file("run.dcp");
        let mut muon = Run::new(Device::Cpu);
        muon.opt = Muon::default().build(&muon.vs, 0.1)?;
        muon.opt.assign_group(1, &["*bias"])?;
        let mut plain = Run::new(Device::Cpu);
        plain.opt = Sgd::default().build(&plain.vs, 0.1)?;
        for mut run in [muon, plain, Run::new(Device::Cpu)] {
            for steps in [0, 3] {
                run.train(steps);
                kind.of(&mut run).save_as(&path, kind.format)?;
                let as_file = folder.file("run.pt");
                run.checkpoint().save_as(&as_file, Format::TorchByName)?;
                run.train(1);
                run.restore(&Checkpoint::load(&as_file)?)?;
                let expected = run.fingerprint();
                run.train(1);
                run.restore(&Checkpoint::load(&path)?)?;
                assert_eq!(run.fingerprint(), expected);
            }
        }
    }
    Ok(())
}

fn checkpoint(kind: Folders, step: u64) -> Checkpoint {
    let mut checkpoint = kind.checkpoint();
    checkpoint.add_value("at", &step).unwrap();
    checkpoint.add_tensor("x", &Tensor::from(step as f32)).unwrap();
    checkpoint
}

#[test]
fn a_folder_of_folders_keeps_the_last_and_the_best() -> Result<()> {
    for kind in KINDS {
        let temporary = Folder::new();
        let of = |format| CheckpointFolder::new(&temporary.0).map(|folder| folder.format(format));
        let folder = of(kind.format)?.keep_last(2).keep_best(1, MetricGoal::Min);
        for (step, score) in [(1, 0.5), (2, 0.25), (3, 0.75), (4, 1.0)] {
            let path = folder.save_scored(step, score, &checkpoint(kind, step))?;
            assert!(path.is_dir());
        }
        assert_eq!(
            names_in(&temporary.0),
            ["2-score-0.25", "3-score-0.75", "4-score-1"]
                .map(|name| format!("step-0000000{name}.{}", kind.ending))
        );
        let best = folder.best(MetricGoal::Min)?.unwrap();
        assert_eq!((best.file.step, best.checkpoint.value::<u64>("at")?), (2, 2));
        // The other formats are beside it, and one replaces the other at the same step.
        of(Format::Torch)?.keep_last(2).save(4, &checkpoint(DCP, 4))?;
        assert_eq!(
            names_in(&temporary.0),
            [format!("step-00000003-score-0.75.{}", kind.ending), "step-00000004.pt".to_owned()]
        );
        folder.save(4, &checkpoint(kind, 4))?;
        folder.save(4, &checkpoint(kind, 4))?;
        assert!(names_in(&temporary.0).contains(&format!("step-00000004.{}", kind.ending)));
        assert!(!names_in(&temporary.0).contains(&"step-00000004.pt".to_owned()));
    }
    Ok(())
}

#[test]
fn a_save_that_has_not_finished_is_not_taken_for_a_checkpoint() -> Result<()> {
    for kind in KINDS {
        let temporary = Folder::new();
        let folder = CheckpointFolder::new(&temporary.0)?.format(kind.format);
        folder.save(1, &checkpoint(kind, 1))?;
        let half = folder.save(2, &checkpoint(kind, 2))?;
        fs::remove_file(half.join(kind.index)).unwrap();
        assert_eq!(folder.latest()?.unwrap().file.step, 1);
        assert_eq!(folder.files()?.len(), 1);
        let error = checkpoint_error(Checkpoint::load(&half));
        assert!(error.to_string().contains("its save has not finished"), "{error}");
        // A young one may still be written.
        folder.save(3, &checkpoint(kind, 3))?;
        assert!(half.exists());
        let old = SystemTime::now() - Duration::from_secs(2 * 3600);
        for path in [half.join(kind.file), half.clone()] {
            fs::File::open(path).unwrap().set_modified(old).unwrap();
        }
        folder.save(4, &checkpoint(kind, 4))?;
        assert!(!half.exists());
        // One that was damaged afterwards is skipped, and so is one that has lost a file.
        let lost = folder.save(5, &checkpoint(kind, 5))?;
        let flipped = folder.save(6, &checkpoint(kind, 6))?;
        fs::remove_file(lost.join(kind.file)).unwrap();
        let mut bytes = fs::read(flipped.join(kind.index)).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(flipped.join(kind.index), bytes).unwrap();
        let found = folder.latest()?.unwrap();
        assert_eq!((found.file.step, found.damaged.len()), (4, 2));
        assert!(found.damaged.iter().all(|error| matches!(error, CheckpointError::Damaged { .. })));
    }
    Ok(())
}

#[test]
fn names_that_would_be_one_are_refused() {
    let folder = Folder::new();
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_value("a", &BTreeMap::from([("b", 1)])).unwrap();
    checkpoint.add_value("a.b", &1).unwrap();
    let error = checkpoint_error(checkpoint.save(folder.file("x.dcp")));
    assert!(matches!(&error, CheckpointError::Unsaveable { name, .. } if name == "a.b"), "{error}");
    assert!(!folder.file("x.dcp").exists());
    // The other formats keep them apart.
    checkpoint.save(folder.file("x.pt")).unwrap();
}

/// Writes some rows of a linear layer from 3 inputs to 4 as Python's `HuggingFaceStorageWriter` does on one of two
/// ranks. The weight has the numbers from 0 on, and the bias those from 12 on.
fn save_rows(folder: &Path, rank: usize) {
    let numbers = |from: usize| (from..).map(|number| (number as f32).to_le_bytes());
    let weight: Vec<u8> = numbers(6 * rank).take(6).flatten().collect();
    let bias: Vec<u8> = numbers(12 + 2 * rank).take(2).flatten().collect();
    let tensors = [("weight", vec![2, 3], weight), ("bias", vec![2], bias)];
    let tensors = tensors.map(|(name, shape, it)| (name.to_owned(), Dtype::Float32, shape, it));
    let row = 2 * rank;
    let sharding = format!(
        r#"{{"weight": {{"saved_offsets": [{row}, 0]}}, "bias": {{"saved_offsets": [{row}]}}}}"#
    );
    let metadata = [("format", "pt"), ("DCP_VERSION", "1.0"), ("DCP_SHARDING_INFO", &sharding)];
    let metadata = metadata.map(|(key, text)| (key.to_owned(), text.to_owned()));
    let writer = Writer::safetensors(tensors, metadata.into(), &Limits::default()).unwrap();
    let name = format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1);
    drop(writer.save(folder.join(name)).unwrap());
}

#[test]
fn a_model_in_rows_of_several_ranks_is_put_together() {
    let folder = Folder::new();
    [0, 1].into_iter().for_each(|rank| save_rows(&folder.0, rank));
    let vs = VarStore::new(Device::Cpu);
    let layer = nn::linear(vs.root(), 3, 4, Default::default());
    let restore = |path: &Path| Checkpoint::load(path)?.restore().add("model", &vs).apply();
    restore(&folder.0).unwrap();
    let expected = Tensor::arange(16, (Kind::Float, Device::Cpu));
    assert_eq!(layer.ws, expected.narrow(0, 0, 12).view([4, 3]));
    assert_eq!(layer.bs.unwrap(), expected.narrow(0, 12, 4));
    // Neither one file of it nor what is left of the folder is taken for the model.
    let one = folder.file("shard-00002-model-00001-of-00001.safetensors");
    let error = checkpoint_error(restore(&one).map(drop));
    assert!(error.to_string().contains("load the folder, `"), "{error}");
    let error = checkpoint_error(Checkpoint::from_bytes(fs::read(one).unwrap()).map(drop));
    assert!(error.to_string().contains("load the folder that it is in"), "{error}");
    fs::remove_file(folder.file("shard-00001-model-00001-of-00001.safetensors")).unwrap();
    let error = checkpoint_error(restore(&folder.0).map(drop));
    assert!(error.to_string().contains("is missing"), "{error}");
}

/// A later version of this crate, with a tch that has more dtypes, may have saved it.
#[test]
fn a_dtype_that_tch_does_not_have_is_named_as_the_problem() {
    let folder = Folder::new();
    let path = folder.file("x.shards");
    let manifest = manifest(r#"{"a":{"kind":"tensor"}}"#, 0);
    let metadata = BTreeMap::from([("tch_amp".to_owned(), manifest)]);
    let save = |dtype: Dtype| {
        let begun = SharedSave::begin(&path, FolderKind::Safetensors).unwrap();
        let tensor = ("a".to_owned(), dtype, vec![1], vec![0u8; 8]);
        let mut writer = ShardWriter::new([tensor], metadata.clone(), &Limits::default()).unwrap();
        let share = writer.save_share(&begun, 0).unwrap();
        drop(begun.finish([share], &Limits::default()).unwrap());
        Checkpoint::load(&path)
    };
    save(Dtype::Int64).unwrap();
    let error = checkpoint_error(save(Dtype::Uint64));
    assert!(error.to_string().contains("a tensor of a dtype that tch does not have"), "{error}");
}
