//! The recipe `text_classifier` with the settings of a published trainer, beside that trainer in Python: the same file of
//! weights, the same sentences, and two ranks.

use std::collections::BTreeMap;
use std::fs;

use serde::Deserialize;
use serde_json::{Value, json};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

use crate::recipe::program::{self, Recipe};
use recipes::log::CSV;
use recipes::measure::{ACCURACY, HELD_OUT, LOSS, SENT};
use recipes::text_classifier::batch::Batch;
use recipes::text_classifier::model::{Classifier, Dropout, Pooling};
use recipes::text_classifier::{self, pretrained};
use tch_amp::Amp;
use testkit::files::Folder;
use testkit::python::Oracle;

/// The settings of the published trainer, but for its sizes, and for dropout, for which the ranks draw other numbers here.
const PUBLISHED: Recipe = Recipe {
    test: "recipe::published::published_program",
    prepare: |_| (),
    data: None,
    options: "--device cpu --published-settings --rows-limit 38 --rows 6 --dev-rows 1 --length 24 --dropout 0 \
              --attention-dropout 0 --ranks 2",
};

#[test]
#[ignore = "a program that the tests here start"]
fn published_program() {
    program::run(text_classifier::main);
}

/// A folder with a small model and sentences, and what makes it and trains with it in Python.
fn written() -> Option<(Folder, Oracle)> {
    let oracle = Oracle::find("bert_trainer.py")?;
    let folder = Folder::new();
    oracle.run(&["write", &path(&folder, "")], "");
    Some((folder, oracle))
}

fn path(folder: &Folder, name: &str) -> String {
    folder.file(name).to_string_lossy().into_owned()
}

/// Trains here, in a folder of its own, and returns that.
fn train(written: &Folder, more: &str) -> Folder {
    let run = Folder::new();
    let files = [
        ("data", path(written, "train.json")),
        ("pretrained", path(written, "")),
        ("weights", path(&run, "best.pt")),
    ];
    let files: String = files.iter().map(|(option, path)| format!(" --{option} {path}")).collect();
    let output = PUBLISHED.start(&run, &(files + " " + more)).output();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    for rank in 0..2 {
        assert!(said.contains(&format!("] rank = {rank}, world_size = 2, n = ")), "{said}");
    }
    assert_eq!(said.matches("device_ids = []\n").count(), 2, "{said}");
    run
}

/// The numbers of a column of the log, by their steps.
fn column(run: &Folder, name: &str) -> BTreeMap<u64, f64> {
    let text = fs::read_to_string(run.file("logs").join(CSV)).unwrap();
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let place = header.iter().position(|column| *column == name).unwrap();
    let number = |line: Vec<&str>| Some((line[0].parse().unwrap(), line[place].parse().ok()?));
    lines.filter_map(number).collect()
}

/// What Python has computed.
#[derive(Debug, Deserialize)]
struct Answer {
    /// Of each step, the mean of the ranks.
    losses: Vec<f64>,
    /// The loss and the accuracy after a step.
    evaluations: BTreeMap<u64, (f64, f64)>,
    /// The names of the weights that are not the same bit by bit.
    different: Vec<String>,
    /// How many numbers the model has.
    parameters: usize,
}

/// Trains in Python, and compares the weights with those of a run here.
fn answer(oracle: &Oracle, written: &Folder, run: &Folder, mut request: Value) -> Answer {
    request["ranks"] = 2.into();
    request["file"] = path(run, "best.pt").into();
    serde_json::from_str(&oracle.run(&["train", &path(written, "")], &request.to_string())).unwrap()
}

/// Both sides use the same kernels in the same order, so the losses of all three steps and the weights after them are
/// the same bit by bit, in f32, with bf16 autocast, and with gradients that are sent in bf16.
#[test]
fn three_steps_on_two_ranks_have_the_bits_of_python() {
    let Some((folder, oracle)) = written() else { return };
    for (amp, compress, bytes) in [("off", "off", 4), ("bf16", "off", 4), ("off", "bf16", 2)] {
        let what = format!("--amp {amp} --compress {compress}");
        let run = train(&folder, &format!("--no-eval {what}"));
        let request = json!({"amp": amp, "compress": compress, "eval_every": 0});
        let python = answer(&oracle, &folder, &run, request);
        let losses: Vec<f64> = column(&run, LOSS).into_values().collect();
        assert_eq!((losses.len(), &losses), (3, &python.losses), "{what}");
        assert_eq!(python.different, [""; 0], "{what}");
        check_traffic(&run, python.parameters * bytes);
    }
}

/// A ring of two ranks sends each number once. Beside the gradients there are only the messages by which the ranks agree.
fn check_traffic(run: &Folder, bytes: usize) {
    let sent = column(run, SENT);
    assert_eq!(sent.len(), if cfg!(target_os = "linux") { 3 } else { 0 });
    let fits = |sent: &f64| (bytes as f64..(bytes + 16_000) as f64).contains(sent);
    assert!(sent.values().all(fits), "{bytes}: {sent:?}");
}

/// The sum of the means of the batches is a sum of four positive f32 numbers: in Python over the batches of the means of
/// the ranks, and here of the ranks of the sums over the batches. Each number goes through two roundings on each side, so
/// the two sums differ by less than five times half a unit in the last place.
#[test]
fn evaluations_are_those_of_python_and_the_best_weights_are_in_a_file_of_their_own() {
    let Some((folder, oracle)) = written() else { return };
    let run = train(&folder, "--amp off --eval-every 2");
    let request = json!({"amp": "off", "compress": "off", "eval_every": 2});
    let python = answer(&oracle, &folder, &run, request);
    let (losses, accuracies) = (column(&run, HELD_OUT), column(&run, ACCURACY));
    assert_eq!(losses.keys().copied().collect::<Vec<_>>(), [2, 3]);
    assert_eq!(python.evaluations.len(), 2);
    for (step, (loss, accuracy)) in &python.evaluations {
        let bound = 5.0 * 2f64.powi(-24) * loss;
        assert!((losses[step] - loss).abs() <= bound, "{losses:?} and {python:?}");
        assert_eq!(accuracies[step], *accuracy);
    }
    assert_eq!(python.different, [""; 0]);
}

/// The logits of Python for some sentences: the bits, and by the formulas in f64.
#[derive(Debug, Deserialize)]
struct Logits {
    off: Vec<Vec<i32>>,
    bf16: Vec<Vec<i32>>,
    formulas: Vec<Vec<f64>>,
}

/// The bits are those of the same operations in Python, and by the formulas of BERT, the numbers are right.
#[test]
fn a_pretrained_model_has_the_logits_of_python_for_both_parts_of_a_sentence() {
    let Some((folder, oracle)) = written() else { return };
    let (_, config) = pretrained::describe(&folder.0, 24).unwrap();
    let dropout = Dropout { hidden: 0.0, attention: 0.0 };
    let vs = VarStore::new(Device::Cpu);
    let model = Classifier::new(&vs.root(), config, Pooling::First, 6, dropout);
    pretrained::load(&folder.0, Pooling::First, &vs).unwrap();

    let (rows, length, lengths) = (4, 9, [9, 1, 5, 8]);
    let at = |row: i64, place: i64| row * 31 + place * 7;
    let token = |row| (0..length).map(|place| at(row, place) % 300).collect::<Vec<_>>();
    let kind = |row| (0..length).map(|place| i64::from(place > row + 2)).collect::<Vec<_>>();
    let (tokens, types): (Vec<_>, Vec<_>) = (0..rows).map(|row| (token(row), kind(row))).unzip();
    let request = json!([tokens, types, lengths]).to_string();
    let python: Logits =
        serde_json::from_str(&oracle.run(&["logits", &path(&folder, "")], &request)).unwrap();

    let whole = |rows: &[Vec<i64>]| Tensor::from_slice2(rows);
    let places = Tensor::arange(length, (Kind::Int64, Device::Cpu));
    let mask = places.lt_tensor(&Tensor::from_slice(&lengths).to_kind(Kind::Int64).unsqueeze(1));
    let labels = Tensor::zeros([rows], (Kind::Int64, Device::Cpu));
    let batch = Batch { tokens: whole(&tokens), types: whole(&types), mask, labels };
    for (amp, want) in [(Amp::Off, &python.off), (Amp::Bf16, &python.bf16)] {
        let region = amp.on(Device::Cpu).unwrap().region();
        let logits = no_grad(|| region.try_run(|| model.logits(&batch, false))).unwrap();
        let found: Vec<Vec<f32>> = Vec::try_from(&logits).unwrap();
        let found: Vec<Vec<i32>> = found
            .iter()
            .map(|row| row.iter().map(|logit| logit.to_bits() as i32).collect())
            .collect();
        assert_eq!(found, *want, "{amp:?}");
    }
    for (found, want) in python.off.iter().flatten().zip(python.formulas.iter().flatten()) {
        let found = f64::from(f32::from_bits(*found as u32));
        assert!((found - want).abs() < 1e-5, "{found} and {want}");
    }
}
