//! The recipe `images` as a process of its own, and in several precisions.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use tch_amp::checkpoint::CheckpointFolder;

use crate::recipe::program::{self, Recipe, assert_same};
use recipes::images::{self, data::Images};
use testkit::files::Folder;

pub const IMAGES: Recipe = Recipe {
    test: "recipe::pictures::images_program",
    prepare: |folder| {
        let data = folder.file("data");
        fs::create_dir_all(&data).unwrap();
        write(&data, "train", &images::bars(0, 240), true);
        write(&data, "t10k", &images::bars(240, 50), false);
    },
    data: Some("data"),
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
    program::run(images::main);
}

pub fn accuracies(text: &str) -> Vec<f64> {
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
