//! A run that was killed, or interrupted by Ctrl-C, and that goes on: it has the numbers of one that was left alone.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;

use safetensors::SafeTensors;
use serde_json::Value;
use signal_hook::consts::SIGKILL;
use tch_amp::checkpoint::CheckpointFolder;

use crate::common::files::Folder;
use crate::program::{losses, start, start_and_signal};

/// What the last checkpoint contains: the bytes of each tensor, and the other parts but for the log, which has the
/// times of the steps.
type State = (BTreeMap<String, Vec<u8>>, Value);

fn last_state(folder: &Folder) -> State {
    let files = CheckpointFolder::new(folder.file("checkpoints")).unwrap().files().unwrap();
    let last = files.last().unwrap();
    assert_eq!(last.step, 40);
    let bytes = fs::read(&last.path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let text = header.metadata().as_ref().unwrap().get("tch_amp").unwrap();
    let mut parts = serde_json::from_str::<Value>(text).unwrap()["parts"].take();
    parts.as_object_mut().unwrap().remove("log").unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = tensors.iter().map(|(name, tensor)| (name.to_owned(), tensor.data().to_vec()));
    (tensors.collect(), parts)
}

/// Fails unless both runs have the same numbers in all steps and at the end.
fn assert_same(run: &Folder, left_alone: &Folder, what: &str) {
    let (losses, expected) = (losses(run), losses(left_alone));
    assert_eq!(expected.len(), 41, "{what}");
    for (line, expected) in losses.iter().zip(&expected) {
        assert_eq!(line, expected, "{what}");
    }
    assert_eq!(losses.len(), expected.len(), "{what}");
    let ((tensors, parts), (expected, others)) = (last_state(run), last_state(left_alone));
    assert_eq!(tensors.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    let different: Vec<_> = tensors.iter().filter(|(name, t)| expected[*name] != **t).collect();
    let names: Vec<_> = different.iter().map(|(name, _)| name).collect();
    assert!(names.is_empty(), "{what}: these tensors differ: {names:?}");
    assert_eq!(parts, others, "{what}");
    assert!(tensors.len() > 100 && parts.get("schedule").is_some(), "{what}: {parts}");
}

/// The report that a run writes at its end.
fn report(folder: &Folder) -> String {
    fs::read_to_string(folder.file("out")).unwrap()
}

#[test]
fn a_killed_run_goes_on_with_the_same_bits_and_without_recomputing() {
    let (calm, killed) = (Folder::new(), Folder::new());
    let text = start(&calm, "").finish();
    let output = start_and_signal(&killed, "--recompute", 14, "KILL");
    assert_eq!(output.status.signal(), Some(SIGKILL), "{output:?}");
    start(&killed, "--resume").finish();
    assert_same(&killed, &calm, "killed");

    // The table, what was written, and the report.
    assert!(text.contains("bf16") && text.contains("    pub fn "), "{text}");
    let html = report(&calm);
    assert_eq!(html.matches("<svg").count(), 3);
    assert!(!html.contains("NaN") && !html.contains("<script"), "{html}");
}

#[cfg(feature = "distributed")]
#[test]
fn killed_ranks_go_on_with_the_same_bits_and_without_zero() {
    let (calm, killed) = (Folder::new(), Folder::new());
    start(&calm, "--ranks 2").finish();
    let output = start_and_signal(&killed, "--ranks 2 --zero", 14, "KILL");
    assert_eq!(output.status.signal(), Some(SIGKILL), "{output:?}");
    start(&killed, "--resume --ranks 2").finish();
    assert_same(&killed, &calm, "two ranks");
}

#[test]
fn ctrl_c_saves_and_says_how_to_go_on() {
    let ranks: &[&str] =
        if cfg!(feature = "distributed") { &["", "--ranks 2 --zero"] } else { &[""] };
    for ranks in ranks {
        let (calm, interrupted) = (Folder::new(), Folder::new());
        start(&calm, ranks).finish();
        let output = start_and_signal(&interrupted, ranks, 5, "INT");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(130), "{said}");
        assert_eq!(said.matches("--resume").count(), 1, "{said}");
        let saved = CheckpointFolder::new(interrupted.file("checkpoints")).unwrap();
        let step = saved.files().unwrap().last().unwrap().step;
        assert!(said.contains(&format!("after step {step}")) && (5..40).contains(&step), "{said}");
        assert!(!interrupted.file("out").exists(), "there is no report of a part of a run");
        start(&interrupted, &format!("--resume {ranks}")).finish();
        assert_same(&interrupted, &calm, ranks);
    }
}

#[test]
fn a_checkpoint_is_neither_lost_nor_continued_with_other_options() {
    let folder = Folder::new();
    let output = start_and_signal(&folder, "", 5, "TERM");
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    for (arguments, word) in [("", "--resume"), ("--resume --lr 1", "--lr 0.001")] {
        let refused = start(&folder, arguments).output();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(said.contains(word), "{said}");
    }
    start(&folder, "--resume").finish();
    let whole = losses(&folder);
    // A run that is finished makes room for the next one.
    start(&folder, "").finish();
    assert_eq!(losses(&folder), whole);
}
