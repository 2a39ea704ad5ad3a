//! A fault that is planted in the shim of a debug build makes these tests fail.

use testkit::programs::passes;

use crate::graph::gpu;

/// With the fault, steps take the learning rate as a number of the host, which stands still in a graph.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "faults are planted in debug builds")]
fn a_rate_of_the_host_is_noticed() {
    let Some(_alone) = gpu() else { return };
    for test in [
        "graph::replays::every_algorithm_replays_what_it_steps",
        "graph::replays::masters_are_replayed",
    ] {
        assert!(!passes(test, &[("TCH_AMP_PLANTED_FAULT", "host_rate")]), "{test}");
    }
    assert!(passes("graph::replays::every_way_of_stepping_is_replayed", &[]));
}
