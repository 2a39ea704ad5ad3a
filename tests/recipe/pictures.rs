//! The recipe `images` as a process of its own, as two ranks, and in several precisions.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

#[cfg(feature = "distributed")]
use anyhow::ensure;
use flate2::Compression;
use flate2::write::GzEncoder;
#[cfg(feature = "distributed")]
use tch::nn::{ModuleT, VarStore};
#[cfg(feature = "distributed")]
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::CheckpointFolder;

use crate::common::files::Folder;
use crate::images::{self, data::Images};
use crate::program::{self, Recipe, assert_same, losses};
#[cfg(feature = "distributed")]
use crate::recipe::{Ended, Ranks};

const IMAGES: Recipe = Recipe {
    test: "pictures::images_program",
    prepare: |folder| {
        let data = folder.file("data");
        fs::create_dir_all(&data).unwrap();
        write(&data, "train", &images::bars(0, 240), true);
        write(&data, "t10k", &images::bars(240, 50), false);
    },
    data: "data",
    options: "--device cpu --amp off --width 8 --stages 2 --rows 16 --lr 0.05 --steps 40 --log-every 1 --eval-every 10 \
              --save-every 4 --swa-every 2 --swa-batches 4",
};

/// Writes images in the format of MNIST, compressed or not.
fn write(folder: &Path, part: &str, images: &Images, is_packed: bool) {
    let count = images.labels.len() as u8;
    let pixels = [&[0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 8, 0, 0, 0, 8], &*images.pixels].concat();
    let labels = [&[0, 0, 8, 1, 0, 0, 0, count], &*images.labels].concat();
    for (kind, bytes) in [("images-idx3", pixels), ("labels-idx1", labels)] {
        let path = folder.join(format!("{part}-{kind}-ubyte"));
        if is_packed {
            let file = File::create(path.with_extension("gz")).unwrap();
            let mut file = GzEncoder::new(file, Compression::fast());
            file.write_all(&bytes).unwrap();
            file.finish().unwrap();
        } else {
            fs::write(path, bytes).unwrap();
        }
    }
}

#[test]
#[ignore = "a program that other tests start"]
fn images_program() {
    program::run(|arguments| images::main(arguments));
}

fn numbers(folder: &Folder) -> Vec<Vec<Option<f64>>> {
    let row = |line: Vec<String>| line.iter().map(|cell| cell.parse().ok()).collect();
    losses(folder).into_iter().skip(1).map(row).collect()
}

/// The largest difference between the numbers of two runs.
fn difference(one: &Folder, other: &Folder) -> f64 {
    let (one, other) = (numbers(one), numbers(other));
    assert_eq!((one.len(), other.len()), (40, 40));
    let pairs = one.iter().flatten().zip(other.iter().flatten());
    let differences = pairs.map(|(one, other)| {
        assert_eq!(one.is_some(), other.is_some());
        (one.unwrap_or(0.0) - other.unwrap_or(0.0)).abs()
    });
    differences.fold(0.0, f64::max)
}

fn accuracies(text: &str) -> Vec<f64> {
    let row = text.lines().find(|line| line.starts_with("fp32")).unwrap();
    row.split_whitespace().skip(1).take(2).map(|cell| cell.parse().unwrap()).collect()
}

#[test]
fn ctrl_c_saves_and_the_run_goes_on_with_the_same_bits() {
    let ranks: &[&str] = if cfg!(feature = "distributed") { &["", "--ranks 2"] } else { &[""] };
    for ranks in ranks {
        let (calm, interrupted) = (Folder::new(), Folder::new());
        let whole = IMAGES.start(&calm, ranks).finish();
        let output = IMAGES.start_and_signal(&interrupted, ranks, 5, "INT");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(130), "{said}");
        let saved = CheckpointFolder::new(interrupted.file("checkpoints")).unwrap();
        let step = saved.files().unwrap().last().unwrap().step;
        assert!(said.contains(&format!("after step {step}")) && (5..40).contains(&step), "{said}");
        let resumed = IMAGES.start(&interrupted, &format!("--resume {ranks}")).finish();
        assert_same(&interrupted, &calm, ranks);
        assert_eq!(accuracies(&resumed), accuracies(&whole), "{ranks}");
    }
}

#[cfg(feature = "distributed")]
#[test]
#[ignore = "a program that the next test starts"]
fn buffers_program() {
    program::run(|_| {
        let Some(ranks) = Ranks::start(Some(2))? else { return Ok(Ended::Finished) };
        let vs = VarStore::new(Device::Cpu);
        let norm = ranks.batch_norm2d(vs.root() / "norm", 3, Default::default(), false);
        let rank = ranks.rank() as f64;
        drop(norm.forward_t(&Tensor::full([2, 3, 4, 4], rank, (Kind::Float, Device::Cpu)), true));
        let mean = vs.variables()["norm.running_mean"].view([1, 3]);
        let [first, second] = [0, 1].map(|rank| ranks.gather(&mean).map(|all| all.get(rank)));
        ensure!(first? != second?, "the ranks have updated the statistics with their own rows");
        ranks.same_buffers(&vs)?;
        ensure!(mean.sum(Kind::Double).double_value(&[]) == 0.0, "not those of the first rank");
        ensure!(ranks.any(true)?, "the ranks are still together");
        Ok(Ended::Finished)
    });
}

#[cfg(feature = "distributed")]
#[test]
fn all_ranks_get_the_statistics_of_the_first_one() {
    let program = Recipe { test: "pictures::buffers_program", prepare: |_| (), ..IMAGES };
    program.start(&Folder::new(), "").finish();
}

#[cfg(feature = "distributed")]
#[test]
fn two_ranks_with_synchronized_statistics_have_the_numbers_of_one_process() {
    let folders = [Folder::new(), Folder::new(), Folder::new()];
    let arguments = ["", "--ranks 2 --sync-batch-norm", "--ranks 2"];
    let texts: Vec<_> = folders
        .iter()
        .zip(arguments)
        .map(|(folder, arguments)| IMAGES.start(folder, arguments).finish())
        .collect();
    let synced = difference(&folders[0], &folders[1]);
    let each = difference(&folders[0], &folders[2]);
    println!("{synced:.1e} with synchronized statistics, and {each:.1e} without");
    assert!(synced < 1e-3 && each > 1e-2, "{synced} and {each}");
    for text in &texts {
        assert!(accuracies(text).iter().all(|accuracy| *accuracy > 0.9), "{text}");
    }
}

#[test]
fn precisions_are_compared_each_with_a_folder_of_its_own() {
    let folder = Folder::new();
    let running = IMAGES.start(&folder, "--compare all");
    let output = running.output();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert_eq!(stderr.matches("fp16 is left out").count(), 1, "{stderr}");
    let rows: Vec<_> =
        stdout.lines().filter_map(|line| line.split_once(' ')).map(|row| row.0).collect();
    assert!(
        rows.contains(&"fp32") && rows.contains(&"bf16") && !rows.contains(&"fp16"),
        "{stdout}"
    );
    for name in ["fp32", "bf16"] {
        let saved = CheckpointFolder::new(folder.file("checkpoints").join(name)).unwrap();
        assert_eq!(saved.files().unwrap().last().unwrap().step, 40);
        assert!(folder.file("logs").join(name).join("log.csv").is_file());
    }
    let html = fs::read_to_string(folder.file("out")).unwrap();
    assert_eq!(html.matches("<svg").count(), 3);
    assert!(html.contains("Classes in bf16") && !html.contains("NaN"), "{html}");

    // Both are finished: they are only tested again, with the same answers.
    let again = IMAGES.start(&folder, "--compare all --resume").finish();
    assert_eq!(accuracies(&again), accuracies(&stdout));
}
