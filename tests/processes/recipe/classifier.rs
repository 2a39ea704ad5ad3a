//! The recipe `text_classifier` as a process of its own, and as two ranks.

use std::fs;

use crate::recipe::program::{self, Recipe, assert_equal};
use recipes::log::CSV;
use recipes::text_classifier;
use testkit::files::Folder;

const CLASSIFIER: Recipe = Recipe {
    test: "recipe::classifier::classifier_program",
    prepare: |folder| {
        let line = |i: usize| {
            let [label, verb] = [["cat", "purrs"], ["dog", "barks"], ["bird", "sings"]][i % 3];
            format!("{label}\tThe {label} {}{verb} in the year {i}\n", "always ".repeat(i % 4))
        };
        fs::write(folder.file("data"), (0..120).map(line).collect::<String>()).unwrap();
    },
    data: Some("data"),
    options: "--device cpu --amp off --width 64 --layers 1 --rows 8 --steps 60 --vocabulary 200 --log-every 1 \
              --eval-every 10 --dropout 0",
};

#[test]
#[ignore = "a program that other tests start"]
fn classifier_program() {
    program::run(text_classifier::main);
}

/// Runs the program on sentences about pets, and returns the folder of its files and what it printed.
fn run(more: &str) -> (Folder, String) {
    let folder = Folder::new();
    let text = CLASSIFIER.start(&folder, more).finish();
    (folder, text)
}

/// The first columns of the log: the step, the loss, and the loss and the accuracy on held-out sentences.
fn numbers(folder: &Folder) -> Vec<[Option<f64>; 4]> {
    let text = fs::read_to_string(folder.file("logs").join(CSV)).unwrap();
    let row = |line: &str| {
        let mut cells = line.split(',').map(|cell| cell.parse().ok());
        std::array::from_fn(|_| cells.next().unwrap())
    };
    text.lines().skip(1).map(row).collect()
}

#[test]
fn the_classifier_prints_its_scores_and_two_ranks_have_the_numbers_of_one_process() {
    let (one, text) = run("");
    for words in ["precision", "bird", "micro average", "macro average", "weighted average"] {
        assert!(text.contains(words), "{text}");
    }
    let html = fs::read_to_string(one.file("out")).unwrap();
    assert_eq!(html.matches("<svg").count(), 3);
    assert!(!html.contains("NaN"), "{html}");
    let one = numbers(&one);
    assert_eq!(one.len(), 60);
    assert!(one[59][3] > Some(0.9), "{one:?}");
    if cfg!(feature = "distributed") {
        let (two, _) = run("--ranks 2");
        let two = numbers(&two);
        assert_eq!(two.len(), 60);
        for (one, two) in one.iter().zip(&two) {
            for (one, two) in one.iter().zip(two) {
                assert_eq!(one.is_some(), two.is_some());
                let [one, two] = [one.unwrap_or(0.0), two.unwrap_or(0.0)];
                assert!((one - two).abs() < 1e-3, "{one} and {two}");
            }
        }
    }
}

/// Epochs end with a smaller batch, and threads read ahead of what a checkpoint has.
#[test]
fn a_killed_run_over_epochs_goes_on_with_the_same_bits_and_without_threads() {
    let (calm, killed) = (Folder::new(), Folder::new());
    let epochs =
        "--epochs 4 --rows 10 --pooling first --attention-dropout 0.1 --save-every 4 --ranks 2";
    CLASSIFIER.start(&calm, epochs).finish();
    let output = CLASSIFIER.start_and_signal(&killed, &format!("{epochs} --workers 2"), 14, "KILL");
    assert!(!output.status.success());
    CLASSIFIER.start(&killed, &format!("{epochs} --resume")).finish();
    assert_equal(&killed, &calm, "over epochs");
}
