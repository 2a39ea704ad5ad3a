//! The recipe `text_classifier` as a process of its own, and as two ranks.

use std::env;
use std::fs;
use std::process::{Command, exit};

use crate::common::files::Folder;
use crate::recipe::Ended;
use crate::recipe::log::CSV;
use crate::text_classifier;

/// Has the arguments of the program, one a line.
const ARGUMENTS: &str = "TCH_AMP_TEST_CLASSIFIER";

#[test]
#[ignore = "a program that other tests start"]
fn classifier_program() {
    let Ok(arguments) = env::var(ARGUMENTS) else { return };
    tch::set_num_threads(1);
    match text_classifier::main(arguments.lines().map(str::to_owned)) {
        Ok(Ended::Finished) => {}
        Ok(Ended::Interrupted { .. }) => exit(130),
        Err(error) => {
            eprintln!("{error:#}");
            exit(1);
        }
    }
}

/// Runs the program on sentences about pets, and returns the folder of its files and what it printed.
fn run(more: &str) -> (Folder, String) {
    let folder = Folder::new();
    let lines: Vec<String> = (0..120)
        .map(|i| {
            let [label, verb] = [["cat", "purrs"], ["dog", "barks"], ["bird", "sings"]][i % 3];
            format!("{label}\tThe {label} {}{verb} in the year {i}", "always ".repeat(i % 4))
        })
        .collect();
    fs::write(folder.file("data"), lines.join("\n")).unwrap();
    let paths = ["data", "checkpoints", "logs", "out"]
        .map(|name| format!("--{name}\n{}", folder.file(name).display()));
    let options = "--device cpu --amp off --width 64 --layers 1 --rows 8 --steps 60 --vocabulary 200 --log-every 1 --eval-every 10 \
                   --dropout 0";
    let words: Vec<&str> = options.split_whitespace().chain(more.split_whitespace()).collect();
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "classifier::classifier_program", "--ignored", "--nocapture"])
        .env(ARGUMENTS, format!("{}\n{}", paths.join("\n"), words.join("\n")))
        .output()
        .unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{stdout}\n{stderr}");
    (folder, stdout)
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
    assert!(text.contains("precision") && text.contains("bird"), "{text}");
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
