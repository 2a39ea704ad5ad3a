//! A run that was killed, or interrupted by Ctrl-C, and that goes on: it has the numbers of one that was left alone.

use std::fs;
use std::os::unix::process::ExitStatusExt;

use signal_hook::consts::SIGKILL;
use tch_amp::checkpoint::CheckpointFolder;

use crate::recipe::program::{self, Recipe, assert_same};
use recipes::gpt;
use testkit::files::Folder;

pub const GPT: Recipe = Recipe {
    test: "recipe::resumed::gpt_program",
    prepare: |folder| {
        let line = "    pub fn learn(&mut self) { self.read() }\n";
        fs::write(folder.file("data"), line.repeat(300)).unwrap();
    },
    data: Some("text"),
    options: "--device cpu --width 64 --layers 2 --length 32 --rows 4 --steps 40 --log-every 1 --eval-every 10 \
              --save-every 4 --sample 20",
};

#[test]
#[ignore = "a program that other tests start"]
fn gpt_program() {
    program::run(gpt::main);
}

/// The report that a run writes at its end.
fn report(folder: &Folder) -> String {
    fs::read_to_string(folder.file("out")).unwrap()
}

#[test]
fn a_killed_run_goes_on_with_the_same_bits_and_without_recomputing() {
    let (calm, killed) = (Folder::new(), Folder::new());
    let text = GPT.start(&calm, "").finish();
    let output = GPT.start_and_signal(&killed, "--recompute", 14, "KILL");
    assert_eq!(output.status.signal(), Some(SIGKILL), "{output:?}");
    GPT.start(&killed, "--resume").finish();
    assert_same(&killed, &calm, "killed");

    // The table, what was written, and the report.
    assert!(text.contains("bf16") && text.contains("    pub fn "), "{text}");
    let html = report(&calm);
    assert_eq!(html.matches("<svg").count(), 3);
    assert!(!html.contains("NaN") && !html.contains("<script"), "{html}");
}

#[test]
fn killed_ranks_go_on_with_the_same_bits_and_without_zero() {
    let (calm, killed) = (Folder::new(), Folder::new());
    GPT.start(&calm, "--ranks 2").finish();
    let output = GPT.start_and_signal(&killed, "--ranks 2 --zero", 14, "KILL");
    assert_eq!(output.status.signal(), Some(SIGKILL), "{output:?}");
    GPT.start(&killed, "--resume --ranks 2").finish();
    assert_same(&killed, &calm, "two ranks");
}

#[test]
fn ctrl_c_saves_and_says_how_to_go_on() {
    let ranks: &[&str] =
        if cfg!(feature = "distributed") { &["", "--ranks 2 --zero"] } else { &[""] };
    for ranks in ranks {
        let (calm, interrupted) = (Folder::new(), Folder::new());
        GPT.start(&calm, ranks).finish();
        let output = GPT.start_and_signal(&interrupted, ranks, 5, "INT");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(130), "{said}");
        assert_eq!(said.matches("--resume").count(), 1, "{said}");
        let saved = CheckpointFolder::new(interrupted.file("checkpoints")).unwrap();
        let step = saved.files().unwrap().last().unwrap().step;
        assert!(said.contains(&format!("after step {step}")) && (5..40).contains(&step), "{said}");
        assert!(!interrupted.file("out").exists(), "there is no report of a part of a run");
        GPT.start(&interrupted, &format!("--resume {ranks}")).finish();
        assert_same(&interrupted, &calm, ranks);
    }
}

#[test]
fn a_checkpoint_is_neither_lost_nor_continued_with_other_options() {
    let folder = Folder::new();
    let output = GPT.start_and_signal(&folder, "", 5, "TERM");
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    for (arguments, word) in [("", "--resume"), ("--resume --lr 1", "--lr 0.001")] {
        let refused = GPT.start(&folder, arguments).output();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(said.contains(word), "{said}");
    }
    GPT.start(&folder, "--resume").finish();
}
