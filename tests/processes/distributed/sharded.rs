//! Optimizers whose state is divided among the ranks, beside ones that are not.

use std::sync::Mutex;

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{DistributedError, ProcessGroup};
use tch_amp::optim::{
    Adafactor, Adagrad, Adam, AdamW, Algorithm, Lion, MasterWeights, MomentDtype, Muon, NAdam,
    Optimizer, OptimizerState, RmsProp, Sgd,
};
use tch_amp::{Error, GradScaler};

use super::ranks;
use testkit::bits::bits;

const SHAPES: [&[i64]; 5] = [&[3], &[8, 5], &[4], &[7, 3], &[1]];

pub(super) struct Model {
    pub(super) vs: VarStore,
    weights: Vec<Tensor>,
}

impl Model {
    pub(super) fn new(kind: Kind) -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        let weight = |(i, shape): (usize, &&[i64])| {
            vs.root().var(&format!("w{i}"), shape, nn::Init::Const(0.25 * (i as f64 + 1.0)))
        };
        let weights = SHAPES.iter().enumerate().map(weight).collect();
        vs.set_kind(kind);
        Self { vs, weights }
    }

    /// Gradients that are the same on all ranks, as averaging leaves them.
    fn backward(&self, scaler: &mut GradScaler, step: i64) {
        let loss: Tensor = self
            .weights
            .iter()
            .enumerate()
            .map(|(i, weight)| {
                let places = Tensor::arange(weight.numel() as i64, (Kind::Float, Device::Cpu));
                let factors = (places * 0.7 + (step * 5 + i as i64) as f64).sin().view_as(weight);
                (weight.to_kind(Kind::Float) * factors).sum(Kind::Float)
            })
            .sum();
        scaler.backward(&if step == 2 { loss * f64::INFINITY } else { loss }).unwrap();
    }

    pub(super) fn train(
        &self,
        opt: &mut Optimizer,
        scaler: &mut GradScaler,
        steps: std::ops::Range<i64>,
    ) {
        for step in steps {
            opt.zero_grad().unwrap();
            self.backward(scaler, step);
            let outcome = scaler.step_clip_norm(opt, 2.0).unwrap();
            assert_eq!(outcome.is_stepped().unwrap(), step != 2);
            scaler.update().unwrap();
        }
    }

    pub(super) fn bits(&self) -> Vec<Vec<u8>> {
        self.weights.iter().map(bits).collect()
    }
}

pub(super) fn state_bits(state: &OptimizerState) -> Vec<(String, String, Vec<u8>)> {
    let tensors = state.state.iter().flat_map(|(name, tensors)| {
        tensors.iter().map(move |(key, tensor)| (name.clone(), key.clone(), bits(tensor)))
    });
    tensors.collect()
}

fn algorithms() -> [Algorithm; 10] {
    [
        AdamW::default().into(),
        Adam { amsgrad: true, ..Default::default() }.into(),
        Sgd::default().into(),
        Sgd { momentum: 0.9, dampening: 0.1, ..Default::default() }.into(),
        Adagrad::default().into(),
        RmsProp { centered: true, ..Default::default() }.into(),
        Lion::default().into(),
        Muon::default().into(),
        NAdam::default().into(),
        Adafactor::default().into(),
    ]
}

pub(super) fn build(model: &Model, algorithm: Algorithm, masters: MasterWeights) -> Optimizer {
    let mut opt = algorithm.master_weights(masters).build(&model.vs, 0.05).unwrap();
    assert_eq!(opt.assign_group(1, &["w3", "w0"]).unwrap(), 2);
    opt.set_lr_group(1, 0.025).unwrap();
    opt
}

pub(super) fn sharded(
    model: &Model,
    group: &ProcessGroup,
    algorithm: Algorithm,
    masters: MasterWeights,
) -> Optimizer {
    let mut opt = build(model, algorithm, masters);
    opt.shard_over(group).unwrap();
    opt
}

#[test]
fn sharded_training_is_the_same_and_resumes_with_another_number_of_ranks() {
    let modes = [
        (Kind::Float, MasterWeights::None),
        (Kind::BFloat16, MasterWeights::Float),
        (Kind::BFloat16, MasterWeights::Remainder),
        (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 3 }),
    ];
    for algorithm in algorithms() {
        for (kind, masters) in modes {
            let scaler = || GradScaler::new(Device::Cpu).unwrap();
            let alone = Model::new(kind);
            let mut opt = build(&alone, algorithm, masters);
            let mut alone_scaler = scaler();
            alone.train(&mut opt, &mut alone_scaler, 0..4);
            let half = (alone.bits(), state_bits(&opt.state_dict().unwrap()));
            alone.train(&mut opt, &mut alone_scaler, 4..7);
            let whole = (alone.bits(), state_bits(&opt.state_dict().unwrap()));
            let mut results = ranks(3, |group| {
                let model = Model::new(kind);
                let mut opt = sharded(&model, &group, algorithm, masters);
                model.train(&mut opt, &mut scaler(), 0..4);
                (model, opt.state_dict().unwrap())
            });
            for (model, _) in &results {
                assert_eq!(model.bits(), half.0, "{algorithm:?} {kind:?} {masters:?}");
            }
            let (saved, state) = results.remove(0);
            assert_eq!(state_bits(&state), half.1, "{algorithm:?} {kind:?} {masters:?}");
            let saved = Mutex::new((saved.weights, state));
            for size in [1, 2] {
                let resumed = ranks(size, |group| {
                    let model = Model::new(kind);
                    let mut opt = sharded(&model, &group, algorithm, masters);
                    {
                        let saved = saved.lock().unwrap();
                        let weights = model.weights.iter().zip(&saved.0);
                        tch::no_grad(|| {
                            weights.for_each(|(w, saved)| w.shallow_clone().copy_(saved))
                        });
                        opt.load_state_dict(&saved.1).unwrap();
                    }
                    model.train(&mut opt, &mut scaler(), 4..7);
                    (model.bits(), state_bits(&opt.state_dict().unwrap()))
                });
                assert_eq!(resumed[0], whole, "{algorithm:?} {kind:?} {masters:?}, {size} ranks");
                assert!(resumed.iter().all(|(bits, _)| *bits == whole.0));
            }
        }
    }
}

#[test]
fn each_rank_keeps_its_share_of_the_bytes() {
    for size in [1, 2, 4] {
        let kept = ranks(size, |group| {
            let vs = VarStore::new(Device::Cpu);
            let weights: Vec<_> =
                (0..12).map(|i| vs.root().zeros(&format!("w{i}"), &[10 + 3 * (i % 5)])).collect();
            let mut opt = AdamW::default().build(&vs, 0.1).unwrap();
            opt.shard_over(&group).unwrap();
            let loss: Tensor = weights.iter().map(|w| w.sum(Kind::Float)).sum();
            opt.backward_step(&loss).unwrap();
            let state = opt.state_dict().unwrap();
            let moments = state.state.values().flat_map(|tensors| tensors.values());
            let bytes: usize = moments.filter(|t| t.dim() == 1).map(|t| 4 * t.numel()).sum();
            (bytes, weights.iter().map(|w| 8 * w.numel()).max().unwrap(), weights)
        });
        let all = kept[0].0;
        assert_eq!(all, kept[0].2.iter().map(|w| 8 * w.numel()).sum::<usize>());
        // Rank 0 has all that it has collected; of the others, none has more than its share and one parameter.
        for (bytes, largest, _) in &kept[1..] {
            assert!(*bytes > 0 && *bytes <= all / size + largest, "{bytes} of {all} on {size}");
        }
    }
}

#[test]
fn a_step_that_fails_on_one_rank_is_taken_on_none() {
    ranks(2, |group| {
        let model = Model::new(Kind::Float);
        let mut opt = sharded(&model, &group, AdamW::default().into(), MasterWeights::None);
        let mut scaler = GradScaler::disabled();
        model.train(&mut opt, &mut scaler, 0..2);
        let before = model.bits();
        opt.zero_grad().unwrap();
        model.backward(&mut scaler, 3);
        if group.rank() == 1 {
            opt.set_lr(0.5).unwrap();
        }
        let error = opt.step().unwrap_err();
        let Error::Distributed(DistributedError::Mismatch { calls }) = error else {
            panic!("{error}")
        };
        assert!(calls[0].contains("0.05") && calls[1].contains("0.5"), "{calls:?}");
        opt.set_lr(0.05).unwrap();
        // The largest parameter belongs to rank 0.
        if group.rank() == 0 {
            let rows = Tensor::from_slice(&[0i64, 3]);
            opt.zero_grad().unwrap();
            Tensor::embedding(&model.weights[1], &rows, -1, false, true)
                .sum(Kind::Float)
                .backward();
        }
        let error = opt.step().unwrap_err();
        if group.rank() == 0 {
            assert!(matches!(error, Error::Gradient(_)), "{error}");
        } else {
            assert!(error.to_string().contains("which fails there"), "{error}");
        }
        assert_eq!(model.bits(), before);
        opt.zero_grad().unwrap();
        model.train(&mut opt, &mut scaler, 4..5);
        assert_ne!(model.bits(), before);
    });
}

/// The ranks disagree before the first step, where states are made, and before later ones.
#[test]
fn a_step_after_a_mismatch_is_that_of_a_run_without_one() {
    let modes = [
        (Kind::Float, MasterWeights::None),
        (Kind::BFloat16, MasterWeights::Float),
        (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 3 }),
    ];
    for algorithm in algorithms() {
        for (kind, masters) in modes {
            let scaler = || GradScaler::new(Device::Cpu).unwrap();
            let alone = Model::new(kind);
            let mut opt = build(&alone, algorithm, masters);
            alone.train(&mut opt, &mut scaler(), 0..5);
            let expected = (alone.bits(), state_bits(&opt.state_dict().unwrap()));
            let found = ranks(2, |group| {
                let model = Model::new(kind);
                let mut opt = sharded(&model, &group, algorithm, masters);
                let mut scaler = scaler();
                for step in 0..5 {
                    opt.zero_grad().unwrap();
                    model.backward(&mut scaler, step);
                    let before = model.bits();
                    if group.rank() == 1 {
                        opt.set_lr_group(1, 0.5).unwrap();
                    }
                    let error = opt.step().unwrap_err();
                    let is_mismatch =
                        matches!(error, Error::Distributed(DistributedError::Mismatch { .. }));
                    assert!(is_mismatch, "{error}");
                    opt.set_lr_group(1, 0.025).unwrap();
                    assert_eq!(model.bits(), before, "{algorithm:?} {kind:?} {masters:?}");
                    let outcome = scaler.step_clip_norm(&mut opt, 2.0).unwrap();
                    assert_eq!(outcome.is_stepped().unwrap(), step != 2);
                    scaler.update().unwrap();
                }
                let state = opt.state_dict().unwrap();
                (model.bits(), (group.rank() == 0).then(|| state_bits(&state)))
            });
            let what = format!("{algorithm:?} {kind:?} {masters:?}");
            assert!(found.iter().all(|(bits, _)| *bits == expected.0), "{what}");
            assert_eq!(found[0].1.as_ref(), Some(&expected.1), "{what}");
        }
    }
}

#[test]
fn ranks_that_differ_in_one_thing_alone_take_no_step() {
    type Change = fn(&Model, &mut Optimizer);
    let changes: [(Change, &str); 3] = [
        (|_, opt| assert_eq!(opt.assign_group(1, &["w2"]).unwrap(), 1), "\"w2\" in group 1"),
        (|_, opt| opt.set_lr_group(1, 0.5).unwrap(), "group 1: "),
        (
            |model, _| {
                let first = &model.weights[0];
                first.shallow_clone().set_data(&first.detach().view([1, 3]));
            },
            "Float [1, 3]",
        ),
    ];
    for (change, expected) in changes {
        ranks(2, |group| {
            let model = Model::new(Kind::Float);
            let mut opt = sharded(&model, &group, Sgd::default().into(), MasterWeights::None);
            let mut scaler = GradScaler::disabled();
            model.train(&mut opt, &mut scaler, 0..2);
            opt.zero_grad().unwrap();
            if group.rank() == 1 {
                change(&model, &mut opt);
            }
            let before = model.bits();
            model.backward(&mut scaler, 3);
            let error = opt.step().unwrap_err();
            let Error::Distributed(DistributedError::Mismatch { calls }) = error else {
                panic!("{error}")
            };
            assert!(calls[1].contains(expected), "{calls:?}");
            assert_eq!(model.bits(), before);
        });
    }
}

#[test]
fn only_the_same_parameters_are_divided_and_only_once() {
    ranks(2, |group| {
        let model = Model::new(Kind::Float);
        if group.rank() == 1 {
            drop(model.vs.root().zeros("more", &[2]));
        }
        let mut opt = AdamW::default().build(&model.vs, 0.1).unwrap();
        let error = opt.shard_over(&group).unwrap_err();
        assert!(matches!(error, Error::Distributed(DistributedError::Mismatch { .. })), "{error}");
        if group.rank() == 0 {
            drop(model.vs.root().zeros("more", &[2]));
        }
        opt.shard_over(&group).unwrap();
        let error = opt.shard_over(&group).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { name: "optimizer", .. }), "{error}");
        // A variable that is added later has a rank as well.
        let later = model.vs.root().ones("later", &[3]);
        opt.backward_step(&later.sum(Kind::Float)).unwrap();
        assert!(later.double_value(&[2]) < 1.0);
        if group.rank() == 0 {
            assert!(opt.state_dict().unwrap().state.contains_key("later"));
        } else {
            drop(opt.state_dict().unwrap());
        }
    });
}

#[test]
fn what_is_written_to_parameters_without_gradients_is_not_lost() {
    for masters in [MasterWeights::Float, MasterWeights::Remainder] {
        let run = |group: Option<&ProcessGroup>| {
            let model = Model::new(Kind::BFloat16);
            let mut opt = build(&model, Sgd::default().into(), masters);
            if let Some(group) = group {
                opt.shard_over(group).unwrap();
            }
            let mut scaler = GradScaler::disabled();
            model.train(&mut opt, &mut scaler, 0..2);
            // The next step leaves these out.
            for weight in &model.weights[..3] {
                tch::no_grad(|| drop(weight.shallow_clone().fill_(3.0)));
            }
            opt.zero_grad().unwrap();
            model.weights[3].sum(Kind::Float).backward();
            opt.step().unwrap();
            model.train(&mut opt, &mut scaler, 3..4);
            model.bits()
        };
        let alone = run(None);
        for bits in ranks(2, |group| run(Some(&group))) {
            assert_eq!(bits, alone, "{masters:?}");
        }
    }
}

#[test]
fn ranks_whose_parameters_have_come_to_differ_take_no_step() {
    type Change = fn(&Model);
    let changes: [(Change, &str); 3] = [
        (|model| drop(model.vs.root().ones("later", &[3])), "Float [3]"),
        (|model| drop(model.weights[0].set_requires_grad(false)), "the frozen parameter \"w0\""),
        (
            |model| {
                model.weights[0].shallow_clone().set_data(&model.weights[0].to_kind(Kind::Double))
            },
            "Double",
        ),
    ];
    for (change, expected) in changes {
        ranks(2, |group| {
            let model = Model::new(Kind::Float);
            let mut opt = sharded(&model, &group, AdamW::default().into(), MasterWeights::None);
            let mut scaler = GradScaler::disabled();
            model.train(&mut opt, &mut scaler, 0..2);
            opt.zero_grad().unwrap();
            if group.rank() == 1 {
                change(&model);
            } else if expected == "Float [3]" {
                drop(model.vs.root().ones("later", &[4]));
            }
            let before = model.bits();
            model.backward(&mut scaler, 3);
            let error = opt.step().unwrap_err().to_string();
            assert!(error.contains(expected) || error.contains("which fails there"), "{error}");
            assert_eq!(model.bits(), before);
        });
    }
}

/// Parameters that are large enough for low-bit moments, one with a last block of 5 elements.
#[test]
fn moments_of_few_bits_are_divided_and_gathered() {
    let train = |opt: &mut Optimizer, weights: &[Tensor], steps: std::ops::Range<i64>| {
        for step in steps {
            opt.zero_grad().unwrap();
            for (index, weight) in weights.iter().enumerate() {
                let places = Tensor::arange(weight.numel() as i64, (Kind::Float, Device::Cpu));
                let factors: Tensor = (places * 0.7 + (step * 5 + index as i64) as f64).sin();
                (weight * factors.view_as(weight)).sum(Kind::Float).backward();
            }
            opt.step().unwrap();
        }
    };
    let made = || {
        [vec![4101i64], vec![70, 60], vec![20], vec![80, 80]]
            .map(|size| Tensor::ones(size, (Kind::Float, Device::Cpu)).set_requires_grad(true))
    };
    let (adamw, muon) = (Algorithm::from(AdamW::default()), Algorithm::from(Muon::default()));
    for (algorithm, states) in [
        (adamw, MomentDtype::EightBit),
        (adamw, MomentDtype::BFloat16),
        (muon, MomentDtype::BFloat16),
    ] {
        let builder = algorithm.master_weights(MasterWeights::None).moments(states);
        let build = |weights: &[Tensor]| builder.build(weights, 0.05).unwrap();
        let alone = made();
        let mut opt = build(&alone);
        train(&mut opt, &alone, 0..3);
        let mut saved = opt.state_dict().unwrap();
        // Later steps change the optimizer's own tensors.
        for tensor in saved.state.values_mut().flat_map(|tensors| tensors.values_mut()) {
            *tensor = tensor.copy();
        }
        let half = (alone.each_ref().map(bits), state_bits(&saved));
        let saved = Mutex::new((alone.each_ref().map(|weight| weight.detach().copy()), saved));
        train(&mut opt, &alone, 3..5);
        let whole = (alone.each_ref().map(bits), state_bits(&opt.state_dict().unwrap()));
        for (size, steps, expected) in [(3, 0..3, &half), (2, 3..5, &whole)] {
            let results = ranks(size, |group| {
                let weights = made();
                let mut opt = build(&weights);
                opt.shard_over(&group).unwrap();
                if steps.start > 0 {
                    let saved = saved.lock().unwrap();
                    for (weight, saved) in weights.iter().zip(&saved.0) {
                        tch::no_grad(|| weight.shallow_clone().copy_(saved));
                    }
                    opt.load_state_dict(&saved.1).unwrap();
                }
                train(&mut opt, &weights, steps.clone());
                (weights.each_ref().map(bits), state_bits(&opt.state_dict().unwrap()))
            });
            assert!(
                results.iter().all(|(weights, _)| *weights == expected.0),
                "{states:?} on {size}"
            );
            assert!(results[0].1 == expected.1, "{states:?} on {size}");
        }
    }
}
