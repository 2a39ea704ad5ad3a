//! Replays beside eager iterations, bit by bit.

use tch::{Device, Kind, Tensor};
use tch_amp::average::{Averaging, Ema, Swa};
use tch_amp::optim::{MasterWeights, MomentDtype, Muon};
use tch_amp::scaler::GradScalerConfig;

use crate::graph::gpu;
use crate::graph::training::{Program, Training, Way, adamw, first_difference, train};
use testkit::optimizers::algorithms;
use testkit::{is_set, skipped};

fn assert_same(program: Program, iterations: usize) {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let [eager, replayed] =
        [false, true].map(|captures| train(program, device, iterations, captures));
    assert_eq!(first_difference(&eager, &replayed), None, "{program:?}");
}

#[test]
fn adamw_replays_a_thousand_iterations() {
    assert_same(adamw(), 1000);
}

#[test]
fn every_algorithm_replays_what_it_steps() {
    for algorithm in algorithms() {
        assert_same(Program::new(algorithm), 60);
    }
}

#[test]
fn every_way_of_stepping_is_replayed() {
    for way in [Way::ClipNorm, Way::UnscaleAndClip, Way::UnlessSpike] {
        assert_same(Program { way, ..adamw() }, 60);
    }
}

#[test]
fn averages_and_dropout_go_on_in_replays() {
    let ema = |debias| Ema { decay: 0.9, debias, ..Ema::default() }.into();
    let averagings: [Averaging; 3] = [ema(false), ema(true), Swa::default().into()];
    for averaging in averagings {
        let averaging = Some(averaging);
        let program = Program { dropout: true, averaging, ..adamw() };
        assert_same(program, 60);
    }
}

#[test]
fn recomputed_layers_draw_the_same_numbers_in_replays() {
    let program = adamw();
    assert_same(Program { dropout: true, recomputes: true, ..program }, 40);
}

#[test]
fn lean_losses_and_layers_are_replayed() {
    for lean in [None, Some(32)] {
        assert_same(Program { lean: Some(lean), ..adamw() }, 40);
    }
}

#[test]
fn windows_are_replayed_whole() {
    for way in [Way::Step, Way::ClipNorm] {
        let micro_batches = Some(3);
        assert_same(Program { way, micro_batches, ..adamw() }, 40);
    }
}

#[test]
fn every_mode_of_the_scale_is_replayed() {
    let usual = adamw().scaler;
    let tolerant = GradScalerConfig { hysteresis: 2, tolerance: 0.1, ..usual };
    let low = GradScalerConfig { init_scale: 0.25, min_scale: 0.01, growth_interval: 5, ..usual };
    let fixed = GradScalerConfig { init_scale: 1.0, min_scale: 1.0, max_scale: 1.0, ..usual };
    let disabled = GradScalerConfig { enabled: false, ..usual };
    for scaler in [tolerant, low, fixed, disabled] {
        for way in [Way::Step, Way::ClipNorm] {
            assert_same(Program { scaler, way, ..adamw() }, 50);
        }
    }
}

#[test]
fn low_bit_moments_are_replayed() {
    let (adamw, muon) = (adamw(), Program::new(Muon::default()));
    for (program, moments) in [
        (adamw, MomentDtype::BFloat16),
        (adamw, MomentDtype::EightBit),
        (muon, MomentDtype::BFloat16),
    ] {
        for (kind, masters) in
            [(Kind::Float, MasterWeights::None), (Kind::BFloat16, MasterWeights::Remainder)]
        {
            let program = Program { moments, kind, masters, ..program };
            assert_same(Program { hidden: 256, ..program }, 40);
        }
    }
}

#[test]
fn masters_are_replayed() {
    for masters in [
        MasterWeights::Float,
        MasterWeights::Remainder,
        MasterWeights::StochasticRounding { seed: 3 },
    ] {
        for algorithm in algorithms() {
            let kind = Kind::BFloat16;
            assert_same(Program { kind, masters, ..Program::new(algorithm) }, 40);
        }
    }
}

#[test]
fn on_the_cpu_every_call_runs_the_iteration() {
    for way in [Way::Step, Way::UnscaleAndClip, Way::UnlessSpike] {
        let averaging = Some(Ema { decay: 0.9, ..Ema::default() }.into());
        let program = Program { way, averaging, ..adamw() };
        let program = Program { is_scheduled: true, micro_batches: Some(2), ..program };
        let with_graph = train(program, Device::Cpu, 40, true);
        let mut plain = Training::new(program, Device::Cpu);
        let mut without = Vec::new();
        for i in 0..40 {
            plain.feed(i);
            let loss = plain.iteration().unwrap();
            let mut state = plain.state();
            state.push(loss);
            without.push(state.iter().map(Tensor::copy).collect());
        }
        assert_eq!(first_difference(&with_graph, &without), None, "{way:?}");
    }
}

/// What the other tests do with fewer iterations, with every part in each of them. Takes half an hour.
#[test]
fn every_combination_replays_a_thousand_iterations() {
    if !is_set("TCH_AMP_LONG") {
        skipped("1,000 iterations of every combination: set TCH_AMP_LONG=1");
        return;
    }
    let modes = [
        (Kind::Float, MasterWeights::None),
        (Kind::BFloat16, MasterWeights::Float),
        (Kind::BFloat16, MasterWeights::Remainder),
        (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 3 }),
    ];
    for algorithm in algorithms() {
        for (kind, masters) in modes {
            for way in [Way::Step, Way::ClipNorm, Way::UnscaleAndClip] {
                let program = Program { kind, masters, way, ..Program::new(algorithm) };
                let averaging = Some(Ema { decay: 0.9, ..Ema::default() }.into());
                assert_same(
                    Program { averaging, dropout: true, is_scheduled: true, ..program },
                    1000,
                );
            }
        }
    }
}
