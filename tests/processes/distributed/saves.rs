//! Checkpoints that the ranks of a group save together.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Duration;

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::average::{AveragedWeights, Averaging, Ema};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder, Format, Rng};
use tch_amp::distributed::{DistributedError, ProcessGroup, Store};
use tch_amp::optim::{AdamW, MasterWeights, MomentDtype, Muon, Optimizer, Sgd};
use tch_amp::schedule::{CosineAnnealingLr, Scheduler};
use tch_amp::{Error, GradScaler, Result};

use super::processes::{only_line, spawn_ranks};
use super::sharded::{Mode, Model, build};
use super::{calls, ranks};
use testkit::files::{Folder, age, names_in, run_on_small_disk, small_disk};
use testkit::optimizers::state_bits;
use testkit::programs::number;
use testkit::python::Oracle;

type Bits = (Vec<Vec<u8>>, Vec<(String, Vec<u8>)>, f64);

/// A run whose state can be told bit by bit.
struct Run {
    model: Model,
    opt: Optimizer,
    scaler: GradScaler,
}

impl Run {
    fn new(mode: Mode, group: Option<&ProcessGroup>) -> Self {
        let model = Model::new(mode);
        let opt = build(&model, mode, group);
        Self { model, opt, scaler: GradScaler::new(Device::Cpu).unwrap() }
    }

    fn train(&mut self, steps: std::ops::Range<i64>) {
        self.model.train(&mut self.opt, &mut self.scaler, steps);
    }

    fn add_to(&mut self, checkpoint: &mut Checkpoint) {
        checkpoint.add("model", &self.model.vs).unwrap();
        checkpoint.add("optimizer", &mut self.opt).unwrap();
        checkpoint.add("scaler", &mut self.scaler).unwrap();
    }

    fn restore(&mut self, checkpoint: &Checkpoint) {
        let restore = checkpoint.restore().add("model", &self.model.vs);
        let restore = restore.add("optimizer", &mut self.opt).add("scaler", &mut self.scaler);
        restore.apply().unwrap();
    }

    fn bits(&mut self) -> Bits {
        let state = state_bits(&self.opt.state_dict().unwrap());
        (self.model.bits(), state, self.scaler.get_scale().unwrap())
    }
}

fn modes() -> [Mode; 6] {
    [
        Mode::new(AdamW::default(), Kind::Float, MasterWeights::None),
        Mode::new(AdamW::default(), Kind::BFloat16, MasterWeights::Float),
        Mode::new(AdamW::default(), Kind::BFloat16, MasterWeights::Remainder),
        Mode::new(Muon::default(), Kind::BFloat16, MasterWeights::StochasticRounding { seed: 3 }),
        Mode::new(Sgd { momentum: 0.9, ..Default::default() }, Kind::Half, MasterWeights::Float),
        Mode::new(Sgd::default(), Kind::Float, MasterWeights::None),
    ]
}

/// The formats in which ranks save together, with the ending of the names in a folder.
const FORMATS: [(Format, &str); 2] = [(Format::Dcp, "dcp"), (Format::Safetensors, "shards")];

fn open(path: &Path, format: Format) -> CheckpointFolder {
    CheckpointFolder::new(path).unwrap().format(format)
}

/// The name of the index, and that of the file of a rank in the first save.
fn index_of(format: Format) -> &'static str {
    if format == Format::Dcp { ".metadata" } else { "model.safetensors.index.json" }
}

fn file_of(format: Format, rank: usize) -> String {
    match format {
        Format::Dcp => format!("__{rank}_0.distcp"),
        _ => format!("shard-{:05}-model-00001-of-00001.safetensors", rank + 1),
    }
}

/// Saves from four ranks, from two and from three, one after the other, of which each goes on where the last one ended.
#[test]
fn a_run_goes_on_with_other_numbers_of_ranks_bit_by_bit() {
    for (format, _) in FORMATS {
        for mode in modes() {
            let temporary = Folder::new();
            let mut alone = Run::new(mode, None);
            let mut step = 0;
            for (turn, size) in [4, 2, 3, 1].into_iter().enumerate() {
                let steps = step..step + 3;
                alone.train(steps.clone());
                let expected = alone.bits();
                let all = ranks(size, |group| {
                    let mut folder = open(&temporary.0, format).keep_last(1);
                    let mut run = Run::new(mode, Some(&group));
                    if let Some(found) = folder.latest().unwrap() {
                        assert_eq!(found.file.step, steps.start as u64);
                        run.restore(&found.checkpoint);
                    }
                    run.train(steps.clone());
                    let mut checkpoint = Checkpoint::sharded(&group);
                    run.add_to(&mut checkpoint);
                    let path = match turn % 2 {
                        0 => folder.save(steps.end as u64, &checkpoint).unwrap(),
                        _ => {
                            let pending = folder.save_async(steps.end as u64, &checkpoint).unwrap();
                            // What is saved is that of before.
                            run.train(90..92);
                            pending.wait().unwrap()
                        }
                    };
                    // Nobody begins the next part before everybody has loaded this one.
                    run.restore(&Checkpoint::load(path).unwrap());
                    group.barrier().unwrap();
                    run.bits()
                });
                assert_eq!(all[0], expected, "{mode:?}, {size} ranks");
                assert!(all.iter().all(|rank| rank.0 == expected.0), "{mode:?}, {size} ranks");
                let mut whole = Run::new(mode, None);
                whole.restore(&open(&temporary.0, format).latest().unwrap().unwrap().checkpoint);
                assert_eq!(whole.bits(), expected, "{mode:?}, one process");
                step = steps.end;
            }
        }
    }
}

/// A model with everything that is saved in another way, and large enough that its division shows.
struct Everything {
    vs: VarStore,
    opt: Optimizer,
    schedule: Scheduler,
    average: AveragedWeights,
    scaler: GradScaler,
}

impl Everything {
    fn new(group: &ProcessGroup, is_sharded: bool) -> Self {
        let vs = VarStore::new(Device::Cpu);
        for i in 0..24 {
            let _weight = vs.root().zeros(&format!("w{i}"), &[40 + 7 * (i % 5), 64]);
        }
        nn::batch_norm1d(vs.root() / "norm", 64, Default::default());
        for mut weight in vs.trainable_variables() {
            let places = Tensor::arange(weight.numel() as i64, (Kind::Float, Device::Cpu));
            tch::no_grad(|| weight.copy_(&places.cos().view_as(&weight)));
        }
        // What is not trained can differ between ranks.
        for mut own in vs.variables().into_values().filter(|it| !it.requires_grad()) {
            let _own = own.fill_(group.rank() as i64 + 1);
        }
        let _frozen = vs.root().zeros_no_train("frozen", &[5, 5]);
        let builder = AdamW::default().moments(MomentDtype::EightBit);
        let mut opt = builder.build(&vs, 0.01).unwrap();
        if is_sharded {
            opt.shard_over(group).unwrap();
        }
        let loss: Tensor = vs.trainable_variables().iter().map(Tensor::square).map(sum).sum();
        let mut schedule = CosineAnnealingLr { t_max: 9, eta_min: 0.0 }.build(&mut opt).unwrap();
        opt.backward_step(&loss).unwrap();
        schedule.advance(&mut opt).unwrap();
        let average = Averaging::Ema(Ema { decay: 0.9, use_buffers: true, ..Default::default() })
            .build(&vs)
            .unwrap();
        Self { vs, opt, schedule, average, scaler: GradScaler::new(Device::Cpu).unwrap() }
    }

    fn add_to(&mut self, checkpoint: &mut Checkpoint, group: &ProcessGroup) {
        let rank = group.rank();
        checkpoint.add("model", &self.vs).unwrap();
        checkpoint.add("optimizer", &mut self.opt).unwrap();
        checkpoint.add("schedule", &mut self.schedule).unwrap();
        checkpoint.add("average", &mut self.average).unwrap();
        checkpoint.add("scaler", &mut self.scaler).unwrap();
        checkpoint.add("rng", Rng(Device::Cpu)).unwrap();
        checkpoint.add_rngs("rngs", group, Device::Cpu).unwrap();
        checkpoint.add_tensor("own", &Tensor::from_slice(&[rank as i64, 2, 3])).unwrap();
        checkpoint.add_value("notes", &[("step", 7), ("rank", rank)]).unwrap();
        checkpoint.add_value("empty", &Vec::<u8>::new()).unwrap();
    }
}

fn sum(numbers: Tensor) -> Tensor {
    numbers.sum(Kind::Float)
}

/// The whole content of a checkpoint, as the bytes of a file.
fn content(path: &Path) -> Vec<u8> {
    let folder = Folder::new();
    let file = folder.file("content.safetensors");
    Checkpoint::load(path).unwrap().save(&file).unwrap();
    fs::read(file).unwrap()
}

#[test]
fn shares_are_together_what_one_rank_saves_and_each_writes_its_part() {
    let temporary = Folder::new();
    let mut saved = Vec::new();
    let cases = [(1, true), (2, false), (2, true), (3, true), (4, false), (4, true)];
    for ((format, _), (size, is_sharded)) in
        FORMATS.into_iter().flat_map(|format| cases.map(|case| (format, case)))
    {
        let file = |name| temporary.file(&format!("{name} {size} {is_sharded} {format:?}"));
        let (shared, plain) = (file("shared"), file("plain"));
        ranks(size, |group| {
            let mut run = Everything::new(&group, is_sharded);
            // The ranks share a generator, which is a part of both.
            group.barrier().unwrap();
            let mut checkpoint = Checkpoint::sharded(&group);
            run.add_to(&mut checkpoint, &group);
            checkpoint.save_as(&shared, format).unwrap();
            let mut checkpoint = Checkpoint::new();
            run.add_to(&mut checkpoint, &group);
            group.on_rank_0(|| checkpoint.save_as(&plain, format)).unwrap();
        });
        assert!(content(&shared) == content(&plain), "{size} {is_sharded}");
        let files = names_in(&shared);
        let own = (0..size).map(|rank| file_of(format, rank));
        let index = [index_of(format).to_owned()];
        assert_eq!(files, index.into_iter().chain(own).collect::<Vec<_>>());
        let length = |path: &Path| fs::metadata(path).unwrap().len();
        let lengths: Vec<_> = files[1..].iter().map(|name| length(&shared.join(name))).collect();
        // What one process saves is a file, except in the format of Python's folders.
        let is_file = format == Format::Safetensors;
        let all = length(&if is_file { plain.clone() } else { plain.join("__0_0.distcp") });
        assert!(lengths.iter().all(|&it| it * size as u64 <= all / 4 * 5), "{lengths:?} {all}");
        if is_file {
            continue;
        }
        saved.extend([shared, plain].map(|path| path.into_os_string().into_string().unwrap()));
    }
    let Some(oracle) = Oracle::find("dcp_equal.py") else { return };
    let said = oracle.run(&saved.iter().map(String::as_str).collect::<Vec<_>>(), "");
    // Among them three for each of 26 trained weights in the optimizer, and the weights and their averages.
    let tensors: Vec<usize> = said.lines().map(|line| line.parse().unwrap()).collect();
    assert!(tensors.len() == 6 && tensors.iter().all(|&count| count > 5 * 26), "{said}");
}

fn numbers(group: &ProcessGroup, step: i64) -> Checkpoint {
    let vs = constant(step as f64);
    let mut checkpoint = Checkpoint::sharded(group);
    checkpoint.add("model", &vs).unwrap();
    checkpoint.add_value("step", &step).unwrap();
    checkpoint
}

/// A model of which each of three ranks saves a weight.
fn constant(value: f64) -> VarStore {
    let vs = VarStore::new(Device::Cpu);
    for name in ["a", "b", "c"] {
        let _weight = vs.root().var(name, &[100, 300], nn::Init::Const(value));
    }
    vs
}

/// The steps in a folder, and the one of the latest checkpoint, whose numbers must be those of the step.
fn steps(path: &Path, format: Format) -> (Vec<u64>, i64) {
    let folder = open(path, format);
    let found = folder.latest().unwrap().unwrap().checkpoint;
    let step: i64 = found.value("step").unwrap();
    let vs = constant(0.0);
    found.restore().add("model", &vs).apply().unwrap();
    for (name, tensor) in vs.variables() {
        assert_eq!(tensor, Tensor::full_like(&tensor, step), "{name}");
    }
    (folder.files().unwrap().iter().map(|file| file.step).collect(), step)
}

#[test]
fn the_message_of_a_rank_that_cannot_save_reaches_all_and_the_last_checkpoint_stays() {
    for (format, ending) in FORMATS {
        for failing in [0, 2] {
            for in_background in [false, true] {
                let temporary = Folder::new();
                let path = temporary.file("run");
                let checked = Barrier::new(3);
                ranks(3, |group| {
                    let mut folder = open(&path, format).keep_last(1);
                    folder.save(1, &numbers(&group, 1)).unwrap();
                    let save = |folder: &mut CheckpointFolder, step| match in_background {
                        true => folder.save_async(step, &numbers(&group, step as i64))?.wait(),
                        false => folder.save(step, &numbers(&group, step as i64)),
                    };
                    // The folder of this rank is gone, and no other is.
                    let lost = temporary.file("lost");
                    let mut elsewhere = open(&lost, format);
                    checked.wait();
                    drop(fs::remove_dir_all(&lost));
                    checked.wait();
                    let own = group.rank() == failing;
                    let failed =
                        save(if own { &mut elsewhere } else { &mut folder }, 2).unwrap_err();
                    match failed {
                        Error::Checkpoint(CheckpointError::Save(_)) if own => {}
                        Error::Distributed(DistributedError::Rank { rank, message }) if !own => {
                            assert_eq!(rank, failing);
                            assert!(message.contains("lost"), "{message}");
                        }
                        error => panic!("{error}"),
                    }
                    checked.wait();
                    assert_eq!(steps(&path, format), (vec![1], 1));
                    assert_eq!(
                        names_in(&path),
                        [format!("step-00000001.{ending}")],
                        "nothing is left"
                    );
                    checked.wait();
                    // The group goes on, and so does the folder.
                    save(&mut folder, 3).unwrap();
                    group.barrier().unwrap();
                    assert_eq!(steps(&path, format), (vec![3], 3));
                });
            }
        }
    }
}

#[test]
fn ranks_that_save_different_checkpoints_are_told_what_differs() {
    for (format, ending) in FORMATS {
        let temporary = Folder::new();
        let path = temporary.file("run");
        let stores = [(); 2].map(|()| Store::in_process().unwrap());
        ranks(2, |group| {
            let mut folder = open(&path, format);
            let own = group.rank() as u64;
            let disagree = |saved: Result<_>, texts: [&str; 2]| {
                let calls = calls(saved.map(|_: PathBuf| ()).unwrap_err());
                let is_named = calls.iter().zip(texts).all(|(call, text)| call.contains(text));
                assert!(is_named, "{calls:?}");
            };
            // Another step, another name of a part, another shape, and one rank that cannot even begin.
            let steps = [0, 1].map(|step| format!("step-0000000{step}.{ending}"));
            let steps = steps.each_ref().map(String::as_str);
            disagree(folder.save(own, &numbers(&group, 1)), steps);
            let saved =
                folder.save_async(own, &numbers(&group, 1)).and_then(|pending| pending.wait());
            disagree(saved, steps);
            let mut other = Checkpoint::sharded(&group);
            other.add_value(["here", "there"][group.rank()], &1).unwrap();
            disagree(folder.save(1, &other), ["here", "there"]);
            let vs = VarStore::new(Device::Cpu);
            let _weight = vs.root().zeros("w", &[own as i64 + 1]);
            let mut other = Checkpoint::sharded(&group);
            other.add("model", &vs).unwrap();
            disagree(folder.save(1, &other), ["model w Float [1]", "model w Float [2]"]);
            let wrong = numbers(&group, 1).save_as(temporary.file("a.pt"), Format::Torch);
            let text = wrong.unwrap_err().to_string();
            assert!(text.contains("`Format::Dcp`"), "{text}");
            let mut plain = open(&temporary.file("plain"), Format::Torch);
            let text = plain.save_async(1, &numbers(&group, 1)).unwrap_err().to_string();
            assert!(text.contains("`Format::Dcp`"), "{text}");
            let text =
                Checkpoint::from_rank_0(&group, || Ok(Some(numbers(&group, 1)))).unwrap_err();
            assert!(text.to_string().contains("load it on every rank"), "{text}");
            // A state that is divided among other ranks, though as many. The last of these groups is the first one of its
            // store, as `group` is.
            let mut run = Everything::new(&group, true);
            let same = ProcessGroup::new(group.store(), group.rank(), group.size()).unwrap();
            let other = ProcessGroup::new(&stores[group.rank()], 0, 1).unwrap();
            for another in [same, other] {
                let added = Checkpoint::sharded(&another).add("optimizer", &mut run.opt);
                let text = added.unwrap_err().to_string();
                assert!(
                    text.contains("of another group") && text.contains("`shard_over`"),
                    "{text}"
                );
            }
            folder.save(4, &numbers(&group, 4)).unwrap();
        });
        assert_eq!(steps(&path, format), (vec![4], 4));
    }
}

#[test]
fn saves_of_several_folders_in_the_background_do_not_meet() {
    for (format, _) in FORMATS {
        let temporary = Folder::new();
        let paths = ["a", "b", "c"].map(|name| temporary.file(name));
        ranks(3, |group| {
            let mut folders = paths.each_ref().map(|path| open(path, format).keep_last(2));
            let mut pending = Vec::new();
            for step in 1..=4 {
                for (folder, first) in folders.iter_mut().zip([0, 100, 200]) {
                    // Some are still being saved when the next one begins, and one save more by the thread itself.
                    let step = first + step;
                    pending.push(folder.save_async(step, &numbers(&group, step as i64)).unwrap());
                }
                let place = step as usize % 3;
                let step = 100 * place as u64 + 10 + step;
                folders[place].save(step, &numbers(&group, step as i64)).unwrap();
            }
            // Each rank waits in an order of its own.
            if group.rank() == 1 {
                pending.reverse();
            }
            pending.into_iter().for_each(|save| drop(save.wait().unwrap()));
            group.barrier().unwrap();
        });
        // Higher steps do not count for a lower one.
        assert_eq!(steps(&paths[0], format), (vec![3, 4, 13], 13));
        assert_eq!(steps(&paths[1], format), (vec![111, 114], 114));
        assert_eq!(steps(&paths[2], format), (vec![203, 204, 212], 212));
    }
}

/// Rank 0 has waited for the error of a save, and rank 1 has not.
#[test]
fn an_error_that_one_rank_has_kept_stops_the_next_save_of_all() {
    for (format, ending) in FORMATS {
        let temporary = Folder::new();
        let path = temporary.file("run");
        ranks(2, |group| {
            let mut folder = open(&path, format);
            folder.save(1, &numbers(&group, 1)).unwrap();
            group.barrier().unwrap();
            if group.rank() == 0 {
                fs::write(path.join(format!("step-00000002.{ending}")), "a file").unwrap();
            }
            group.barrier().unwrap();
            let failed = folder.save_async(2, &numbers(&group, 2)).unwrap();
            if group.rank() == 0 {
                assert!(failed.wait().unwrap_err().to_string().contains("it is a file"));
            } else {
                drop(failed);
            }
            let stopped = folder.save_async(3, &numbers(&group, 3)).unwrap_err();
            assert!(stopped.to_string().contains("an earlier save in the background"), "{stopped}");
            let is_own = matches!(stopped, Error::Checkpoint(CheckpointError::EarlierSave { .. }));
            assert_eq!(is_own, group.rank() == 1, "{stopped}");
            let is_told =
                matches!(stopped, Error::Distributed(DistributedError::Rank { rank: 1, .. }));
            assert!(is_own || is_told, "{stopped:?}");
            folder.save_async(4, &numbers(&group, 4)).unwrap().wait().unwrap();
            group.barrier().unwrap();
        });
        assert_eq!(steps(&path, format), (vec![1, 4], 4));
    }
}

/// Whether another save still runs is a matter of timing, which differs between ranks.
#[test]
fn a_second_save_is_refused_on_all_ranks_or_on_none() {
    for (format, _) in FORMATS {
        let temporary = Folder::new();
        let saved = ranks(2, |group| {
            // One rank is slow.
            let rate = if group.rank() == 0 { 0 } else { 100 };
            let folder = open(&temporary.0, format).refuse_while_saving();
            let mut folder = folder.max_write_rate(rate);
            let first = folder.save_async(1, &numbers(&group, 1)).unwrap();
            let refused = folder.save_async(2, &numbers(&group, 2)).unwrap_err();
            drop(first);
            folder.save_async(3, &numbers(&group, 3)).unwrap().wait().unwrap();
            refused
        });
        let is_busy = |it: &Error| matches!(it, Error::Checkpoint(CheckpointError::Busy));
        assert!(saved.iter().all(is_busy), "{saved:?}");
        assert_eq!(steps(&temporary.0, format), (vec![1, 3], 3));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_leaves_the_last_checkpoint_and_is_emptied_once() {
    let temporary = Folder::new();
    run_on_small_disk(&temporary.0, 1 << 10, "distributed::saves::ranks_on_a_small_disk");
}

#[test]
#[ignore = "another test runs it on a small disk"]
fn ranks_on_a_small_disk() {
    let Some(disk) = small_disk() else { return };
    for (format, ending) in FORMATS {
        let path = disk.join(ending);
        // What a save has left that was killed a moment ago.
        let leftover = path.join(format!("step-00000001.{ending}"));
        fs::create_dir_all(&leftover).unwrap();
        let half = format!(".{}.1-2.tmp", file_of(format, 1));
        fs::write(leftover.join(half), vec![1; 700 << 10]).unwrap();
        let failed = ranks(3, |group| {
            let mut folder = open(&path, format);
            folder.save(2, &numbers(&group, 2)).unwrap();
            let save = |folder: &mut CheckpointFolder, step| match step % 2 {
                0 => folder.save(step, &numbers(&group, step as i64)).map(drop),
                _ => folder.save_async(step, &numbers(&group, step as i64))?.wait().map(drop),
            };
            // Two of them fit.
            let (step, error) =
                (3..9).find_map(|step| Some((step, save(&mut folder, step).err()?))).unwrap();
            let is_own = matches!(error, Error::Checkpoint(CheckpointError::Save(_)));
            let text = error.to_string();
            assert!(is_own || text.contains("rank"), "{text}");
            assert!(text.contains("No space left"), "{text}");
            group.barrier().unwrap();
            assert_eq!(names_in(&path).len() as u64, step - 2, "{:?}", names_in(&path));
            group.barrier().unwrap();
            // With room again, the same ranks go on.
            let mut folder = open(&path, format).keep_last(1);
            if group.rank() == 0 {
                fs::remove_dir_all(path.join(format!("step-00000002.{ending}"))).unwrap();
            }
            group.barrier().unwrap();
            save(&mut folder, step).unwrap();
            (step, is_own)
        });
        assert!(failed.iter().any(|(_, is_own)| *is_own) && !leftover.exists());
        assert_eq!(steps(&path, format).1 as u64, failed[0].0);
        fs::remove_dir_all(path).unwrap();
    }
}

/// The steps that a rank of [`a_rank_that_is_killed_leaves_the_last_complete_checkpoint`] saves.
const STEPS: i64 = 400;

/// What a rank of these tests does, if `task` is one of theirs, and what it prints.
pub fn run(group: &ProcessGroup, task: &str) -> Option<String> {
    let (ending, path) = task.strip_prefix("saves ")?.split_once(' ')?;
    let (format, _) = FORMATS.into_iter().find(|(_, found)| *found == ending)?;
    let path = Path::new(path);
    tch::set_num_threads(1);
    let mut folder = open(path, format).keep_last(2);
    let mut save = |step: i64| {
        let checkpoint = numbers(group, step);
        match step % 3 {
            0 => folder.save(step as u64, &checkpoint).map(drop),
            1 => folder.save_async(step as u64, &checkpoint)?.wait().map(drop),
            // Waits while it is dropped, and keeps an error for the next one.
            _ => folder.save_async(step as u64, &checkpoint).map(drop),
        }
    };
    let failed = (1..=STEPS).find_map(|step| save(step).err());
    Some(failed.map_or_else(|| "done".to_owned(), |error| error.to_string()))
}

/// Names of checkpoints and their files which no index names.
fn leftovers(path: &Path, format: Format) -> Vec<String> {
    let mut left = Vec::new();
    for name in names_in(path) {
        let folder = path.join(&name);
        let index = fs::read(folder.join(index_of(format))).unwrap_or_default();
        let is_named = |file: &String| {
            file == index_of(format)
                || index.windows(file.len()).any(|part| part == file.as_bytes())
        };
        left.extend(names_in(&folder).into_iter().filter(|file| !is_named(file)));
        left.extend(index.is_empty().then_some(name));
    }
    left
}

#[test]
fn a_rank_that_is_killed_leaves_the_last_complete_checkpoint() {
    let runs = number("TCH_AMP_SAVE_KILLS").unwrap_or(4);
    let seed = number("TCH_AMP_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let seeds: Vec<_> = (seed..seed + runs).collect();
    // The other ranks wait for a few seconds for each other's reports.
    for seeds in seeds.chunks(4) {
        std::thread::scope(|scope| {
            seeds.iter().for_each(|&seed| drop(scope.spawn(move || kill_a_rank(seed))));
        });
    }
}

fn kill_a_rank(seed: u64) {
    let mut rng = testkit::rng::Rng::new(seed);
    let (format, ending) = FORMATS[seed as usize % 2];
    let temporary = Folder::new();
    let mut children = spawn_ranks(&format!("saves {ending} {}", temporary.0.display()), 3);
    while steps_there(&temporary.0, format) < 1 + seed as usize / 2 % 2 {
        assert!(children[0].try_wait().unwrap().is_none(), "seed {seed}: rank 0 has ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_micros(rng.below(60_000) as u64));
    let killed = rng.below(3);
    children[killed].kill().unwrap();
    let last = children.swap_remove(killed);
    drop(last.wait_with_output().unwrap());
    for child in children {
        let said = only_line(child);
        assert!(said != "done", "seed {seed}: {said}");
    }
    let (there, step) = steps(&temporary.0, format);
    assert!(!there.is_empty() && step as u64 == *there.last().unwrap(), "seed {seed}");
    // As if a run went on two hours later, with one rank less.
    age(&temporary.0);
    ranks(2, |group| {
        let folder = open(&temporary.0, format).keep_last(2);
        folder.save(step as u64 + 1, &numbers(&group, step + 1)).unwrap();
    });
    assert_eq!(steps(&temporary.0, format).1, step + 1, "seed {seed}");
    assert_eq!(leftovers(&temporary.0, format), [""; 0], "seed {seed}, rank {killed}");
}

/// How many checkpoints are complete.
fn steps_there(path: &Path, format: Format) -> usize {
    let index = index_of(format);
    names_in(path).iter().filter(|name| path.join(name).join(index).is_file()).count()
}
