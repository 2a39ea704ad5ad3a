//! Scalers that agree over a group, where each rank has gradients of its own.

use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::distributed::ProcessGroup;
use tch_amp::optim::{AmpOptimizer, Sgd};
use tch_amp::scaler::{GradScalerConfig, SpikeConfig};

use super::{calls, is_mismatch, ranks};

/// A weight of this rank alone, with a fused optimizer and one of tch's.
fn optimizer(fused: bool) -> (Tensor, Box<dyn AmpOptimizer>) {
    let vs = VarStore::new(Device::Cpu);
    let weight = vs.root().var("weight", &[2, 1], nn::Init::Const(1.0));
    let optimizer: Box<dyn AmpOptimizer> = if fused {
        Box::new(Sgd::default().build(&vs, 0.25).unwrap())
    } else {
        Box::new(nn::Sgd::default().build(&vs, 0.25).unwrap())
    };
    (weight, optimizer)
}

fn scaler(group: &ProcessGroup) -> GradScaler {
    // Rank 0's scale is the one that all get.
    let scale = 1024.0 * (group.rank() as f64 + 1.0);
    let config = GradScalerConfig { init_scale: scale, growth_interval: 2, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).unwrap();
    scaler.agree_over(group).unwrap();
    scaler
}

#[test]
fn all_ranks_skip_the_step_that_overflows_on_one() {
    for fused in [false, true] {
        for unscale in [false, true] {
            let states = ranks(3, |group| {
                let (weight, mut opt) = optimizer(fused);
                let mut scaler = scaler(&group);
                let mut stepped = Vec::new();
                for step in 0..6 {
                    let overflows = step % 3 == 1 && group.rank() == step / 3 + 1;
                    let factor = if overflows { f64::INFINITY } else { 1.0 };
                    weight.shallow_clone().zero_grad();
                    scaler.backward(&(&weight * factor).sum(Kind::Float)).unwrap();
                    if unscale {
                        scaler.unscale_(opt.as_mut()).unwrap();
                    }
                    stepped.push(scaler.step(opt.as_mut()).unwrap().is_stepped().unwrap());
                    scaler.update().unwrap();
                }
                let scale = scaler.get_scale().unwrap();
                (stepped, weight.double_value(&[1, 0]), scale, scaler.get_growth_tracker().unwrap())
            });
            // 1024, halved twice, doubled once.
            let expected = (vec![true, false, true, true, false, true], 0.0, 512.0, 1);
            assert_eq!(states, vec![expected; 3], "fused {fused}, unscaled {unscale}");
        }
    }
}

/// Each rank would decide by the norm of its own gradients.
#[test]
fn spikes_are_not_skipped_by_ranks_that_could_part() {
    let refused = ranks(2, |group| {
        let w = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.25).unwrap();
        let mut scaler = scaler(&group);
        scaler.backward(&w.sum(Kind::Float)).unwrap();
        let mut spikes = SpikeConfig::default().build().unwrap();
        let error = scaler.step_unless_spike(&mut opt, 1.0, &mut spikes).unwrap_err();
        let stepped = scaler.step(&mut opt).unwrap().is_stepped().unwrap();
        (error.to_string().contains("agrees over a group"), stepped)
    });
    assert_eq!(refused, [(true, true); 2]);
}

#[test]
fn a_rank_without_gradients_backs_off_with_the_others() {
    let scales = ranks(2, |group| {
        let (weight, mut opt) = optimizer(true);
        let mut scaler = scaler(&group);
        if group.rank() == 1 {
            scaler.backward(&(&weight * f64::NAN).sum(Kind::Float)).unwrap();
        }
        let outcome = scaler.step_clip_norm(opt.as_mut(), 1.0).unwrap();
        assert!(outcome.is_skipped().unwrap());
        scaler.update().unwrap();
        // A step in which nothing overflows counts on both.
        weight.shallow_clone().zero_grad();
        if group.rank() == 1 {
            scaler.backward(&weight.sum(Kind::Float)).unwrap();
        }
        drop(scaler.step(opt.as_mut()).unwrap());
        scaler.update().unwrap();
        (scaler.get_scale().unwrap(), scaler.get_growth_tracker().unwrap())
    });
    assert_eq!(scales, [(512.0, 1), (512.0, 1)]);
}

#[test]
fn an_error_of_one_rank_keeps_all_from_stepping() {
    ranks(2, |group| {
        let (weight, mut opt) = optimizer(true);
        let mut scaler = scaler(&group);
        // Clipping takes no sparse gradients.
        let rows = Tensor::embedding(&weight, &Tensor::from_slice(&[0i64, 1]), -1, false, true);
        let loss = if group.rank() == 1 { rows } else { weight.shallow_clone() };
        scaler.backward(&loss.sum(Kind::Float)).unwrap();
        let error = scaler.step_clip_norm(opt.as_mut(), 1.0).unwrap_err();
        match group.rank() {
            0 => assert!(calls(error)[1].contains("sparse")),
            _ => assert!(!is_mismatch(&error) && error.to_string().contains("sparse"), "{error}"),
        }
        assert_eq!(weight.double_value(&[0, 0]), 1.0);
        // With dense gradients the step can be tried again.
        weight.shallow_clone().zero_grad();
        scaler.backward(&weight.sum(Kind::Float)).unwrap();
        assert!(scaler.step(opt.as_mut()).unwrap().is_stepped().unwrap());
        scaler.update().unwrap();
        assert_eq!(weight.double_value(&[0, 0]), 0.75);
    });
}

#[test]
fn any_makes_a_decision_of_one_rank_that_of_all() {
    for decider in 0..4 {
        let decided = ranks(3, |group| group.any(group.rank() == decider).unwrap());
        assert_eq!(decided, [decider < 3; 3]);
    }
}
