//! The reason for master weights: 1 + 1e-4 is rounded to 1 in fp16, as is 1 + 1e-3 in bf16.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{Adam, MasterWeights, Sgd};

use testkit::bits::bits;

fn ones(count: i64, kind: Kind) -> Tensor {
    Tensor::ones([count], (kind, Device::Cpu)).set_requires_grad(true)
}

/// The bits of three weights of 1 after each of 100 steps of Adam, each of size `lr`.
fn train(kind: Kind, lr: f64, masters: MasterWeights) -> Vec<Tensor> {
    let w = ones(3, kind);
    let list = [w.shallow_clone()];
    let mut opt = Adam::default().master_weights(masters).build(&list, lr).unwrap();
    let mut step = || {
        opt.zero_grad().unwrap();
        (-&w).sum(kind).backward();
        opt.step().unwrap();
        w.detach().copy()
    };
    (0..100).map(|_| step()).collect()
}

#[test]
fn without_masters_small_updates_are_lost_and_with_masters_the_f32_weights_are_rounded() {
    for (kind, lr) in [(Kind::Half, 1e-4), (Kind::BFloat16, 1e-3)] {
        let one = Tensor::ones([1], (kind, Device::Cpu));
        assert_eq!(bits(&(&one + lr)), bits(&one), "the sum is rounded to 1");
        let float = train(Kind::Float, lr, MasterWeights::None);
        let plain = train(kind, lr, MasterWeights::None);
        let copies = train(kind, lr, MasterWeights::Float);
        for (step, w) in float.iter().enumerate() {
            // The updates took effect: a hundredth is far more than the rounding errors of f32.
            let way = w.double_value(&[0]) - 1.0;
            let steps = (step + 1) as f64;
            assert!((way / (lr * steps) - 1.0).abs() < 0.01, "{way} after {steps} steps");
            assert_eq!(bits(&plain[step]), bits(&Tensor::ones([3], (kind, Device::Cpu))));
            assert_eq!(bits(&copies[step]), bits(&w.to_kind(kind)), "{kind:?} step {step}");
        }
        assert_ne!(bits(&copies[99]), bits(&plain[99]), "{kind:?}");
    }
}

/// After a thousand steps, with each kind of master weights.
#[test]
fn with_masters_small_updates_add_up() {
    for (kind, update) in [(Kind::Half, 1e-4), (Kind::BFloat16, 1e-3)] {
        let train = |masters: MasterWeights| {
            let w = ones(64, kind);
            let sgd = Sgd::default();
            let mut opt = sgd.master_weights(masters).build(&[w.shallow_clone()], update).unwrap();
            for _ in 0..1000 {
                opt.zero_grad().unwrap();
                (-&w).sum(kind).backward();
                opt.step().unwrap();
            }
            w.to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
        };
        let right = 1.0 + 1000.0 * update;
        assert_eq!(train(MasterWeights::None), 1.0);
        let error = |masters| (train(masters) - right).abs() / right;
        // Half a unit in the last place of bf16, plus the rounding errors of f32 over the steps.
        assert!(error(MasterWeights::Float) < 0.5 / 128.0);
        assert!(error(MasterWeights::Remainder) < 0.5 / 128.0);
        // The noise of a thousand roundings, averaged over 64 weights: four standard deviations.
        let deviation = 0.5 / 128.0 * 2.0 * 1000f64.sqrt() / 64f64.sqrt();
        assert!(error(MasterWeights::StochasticRounding { seed: 1 }) < 4.0 * deviation);
    }
}
