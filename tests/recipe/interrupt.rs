//! What Ctrl-C does to a process.

use std::process::Command;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::raise;

use crate::recipe::Interrupt;

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
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "interrupt::interrupted_program", "--ignored", "--nocapture"])
        .env("TCH_AMP_TEST_TASK", "interrupt")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("goes on") && !said.contains("still there"), "{said}");
    assert!(!Interrupt::never().is_requested());
}
