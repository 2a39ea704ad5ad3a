//! A fault that is planted in the shim of a debug build makes these tests fail.

use std::process::Command;

use crate::graph::gpu;

/// Whether the test passes in a process of its own, with a fault if one is named.
fn passes(test: &str, fault: Option<&str>) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--test-threads=1"]);
    if let Some(fault) = fault {
        command.env("TCH_AMP_PLANTED_FAULT", fault);
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("running 1 test"), "there is no test {test}");
    output.status.success()
}

/// With the fault, steps take the learning rate as a number of the host, which stands still in a graph.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "faults are planted in debug builds")]
fn a_rate_of_the_host_is_noticed() {
    let Some(_alone) = gpu() else { return };
    for test in [
        "graph::replays::every_algorithm_replays_what_it_steps",
        "graph::replays::masters_are_replayed",
    ] {
        assert!(!passes(test, Some("host_rate")), "{test}");
    }
    assert!(passes("graph::replays::every_way_of_stepping_is_replayed", None));
}
