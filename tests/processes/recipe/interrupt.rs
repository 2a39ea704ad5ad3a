//! What Ctrl-C does to a process.

use std::thread::sleep;
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::raise;

use crate::recipe::program::assert_same;
use crate::recipe::resumed::GPT;
use recipes::Interrupt;
use testkit::files::Folder;
use testkit::programs::this_test;

/// Asserts that a program goes on at first, and ends by a signal.
fn ends_by_a_signal(program: &str) {
    let output = this_test(program).env("TCH_AMP_TEST_TASK", "interrupt").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("goes on") && !said.contains("still there"), "{said}");
}

#[test]
#[ignore = "a program that the next test starts"]
fn interrupted_program() {
    if std::env::var_os("TCH_AMP_TEST_TASK").is_none() {
        return;
    }
    let interrupt = Interrupt::catch().unwrap();
    assert!(!interrupt.is_requested());
    raise(SIGTERM).unwrap();
    assert!(interrupt.is_requested());
    println!("goes on");
    raise(SIGINT).unwrap();
    println!("still there");
}

#[test]
fn the_first_signal_is_noted_and_the_second_one_ends_the_program() {
    ends_by_a_signal("recipe::interrupt::interrupted_program");
    assert!(!Interrupt::never().is_requested());
}

#[test]
#[ignore = "a program that the next test starts"]
fn program_without_anything_to_save() {
    if std::env::var_os("TCH_AMP_TEST_TASK").is_none() {
        return;
    }
    let interrupt = Interrupt::catch().unwrap();
    {
        let _saved = interrupt.nothing_to_save();
    }
    assert!(!interrupt.is_requested());
    let _saved = interrupt.nothing_to_save();
    println!("goes on");
    raise(SIGTERM).unwrap();
    println!("still there");
}

#[test]
fn the_first_signal_ends_a_program_that_has_nothing_to_save() {
    ends_by_a_signal("recipe::interrupt::program_without_anything_to_save");
}

/// The steps are done and saved, and the model writes a text for hours.
#[test]
fn one_signal_ends_a_run_that_writes_its_sample() {
    let ranks: &[&str] = if cfg!(feature = "distributed") { &["", "--ranks 2"] } else { &[""] };
    for ranks in ranks {
        let (calm, ended) = (Folder::new(), Folder::new());
        GPT.start(&calm, ranks).finish();
        let long = format!("--sample 1000000 {ranks}");
        let mut run = GPT.start(&ended, &long);
        run.wait_for(40, &ended);
        let last = ended.file("checkpoints").join("step-00000040.safetensors");
        while !last.exists() {
            sleep(Duration::from_millis(10));
        }
        // The sample takes minutes.
        sleep(Duration::from_secs(1));
        run.signal("TERM");
        let output = run.output();
        assert_eq!(output.status.code(), Some(130), "{output:?}");
        assert!(!ended.file("out").exists());
        GPT.start(&ended, &format!("--resume {ranks}")).finish();
        assert_same(&ended, &calm, ranks);
    }
}
