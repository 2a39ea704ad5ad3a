//! What replays cost the host.

use tch_amp::graph::Captured;
use tch_amp::optim::{AdamW, Algorithm, Lion, Muon, RmsProp, Sgd};

use crate::graph::gpu;
use crate::graph::training::{Program, Training, Way, adamw, overflows};
use testkit::simulation::{self, Counts, Simulation};

/// The counts of one replay, with the copy of its batch, for each iteration that does not overflow.
fn costs(program: Program, iterations: usize) -> Vec<Counts> {
    let (Some(gpu), Some(simulation)) = (gpu(), Simulation::find()) else { return Vec::new() };
    let device = gpu.device;
    let mut training = Training::new(program, device);
    let mut graph = Captured::new(device).unwrap();
    let mut out = Vec::new();
    for i in 0..iterations {
        let is_captured = graph.is_captured();
        training.feed(i);
        let ((), counts) = simulation.count(|| {
            graph.replay(|| training.iteration()).map(drop).unwrap();
        });
        if is_captured && !overflows(i) {
            out.push(counts);
        }
    }
    assert!(out.len() + 8 > iterations, "it was not captured early");
    out
}

/// Neither the capture of lean functions nor a replay waits for the device.
#[test]
fn a_replay_of_lean_functions_neither_waits_nor_allocates() {
    if simulation::is_model() {
        return;
    }
    for lean in [None, Some(32)] {
        let program = Program { lean: Some(lean), ..adamw() };
        for counts in costs(program, 30) {
            assert_eq!((counts.host_syncs, counts.allocations), (0, 0), "{program:?}");
            assert!(counts.launches <= 1, "{program:?}: {}", counts.launches);
        }
    }
}

#[test]
fn a_replay_neither_waits_nor_allocates_and_copies_the_rates() {
    if simulation::is_model() {
        return;
    }
    let algorithms: [Algorithm; 5] = [
        AdamW::default().into(),
        Sgd { momentum: 0.9, dampening: 0.5, ..Sgd::default() }.into(),
        RmsProp::default().into(),
        Lion::default().into(),
        Muon::default().into(),
    ];
    for algorithm in algorithms {
        for way in [Way::Step, Way::ClipNorm, Way::UnlessSpike] {
            let program = Program { way, ..Program::new(algorithm) };
            for counts in costs(program, 30) {
                assert_eq!(counts.host_syncs, 0, "{program:?}");
                assert_eq!(counts.allocations, 0, "{program:?}");
                // The copy of the rates; the graph is counted as what it replays.
                assert!(counts.launches <= 1, "{program:?}: {}", counts.launches);
            }
        }
    }
}
