//! Optimizers whose state is divided among the ranks, beside ones that are not.

use std::sync::Mutex;

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::ProcessGroup;
use tch_amp::optim::{AdamW, Algorithm, MasterWeights, MomentDtype, Muon, Optimizer, Sgd};
use tch_amp::{Error, GradScaler};

use super::{calls, ranks};
use testkit::bits::bits;
use testkit::optimizers::{algorithms, state_bits};

type Shapes = &'static [&'static [i64]];

const SHAPES: Shapes = &[&[3], &[8, 5], &[4], &[7, 3], &[1]];

/// Large enough for low-bit moments; one has a last block of 5 elements.
const LARGE: Shapes = &[&[4101], &[70, 60], &[20], &[80, 80]];

/// What is trained, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mode {
    algorithm: Algorithm,
    kind: Kind,
    masters: MasterWeights,
    moments: MomentDtype,
    shapes: Shapes,
}

impl Mode {
    pub(super) fn new(algorithm: impl Into<Algorithm>, kind: Kind, masters: MasterWeights) -> Self {
        let (moments, shapes) = (MomentDtype::F32, SHAPES);
        Self { algorithm: algorithm.into(), kind, masters, moments, shapes }
    }

    /// In f32.
    fn plain(algorithm: impl Into<Algorithm>) -> Self {
        Self::new(algorithm, Kind::Float, MasterWeights::None)
    }

    /// In f32, with such moments.
    fn low_bit(algorithm: impl Into<Algorithm>, moments: MomentDtype) -> Self {
        Self { moments, shapes: LARGE, ..Self::plain(algorithm) }
    }
}

pub(super) struct Model {
    pub(super) vs: VarStore,
    weights: Vec<Tensor>,
}

impl Model {
    pub(super) fn new(mode: Mode) -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        let weight = |(i, shape): (usize, &&[i64])| {
            vs.root().var(&format!("w{i}"), shape, nn::Init::Const(0.25 * (i as f64 + 1.0)))
        };
        let weights = mode.shapes.iter().enumerate().map(weight).collect();
        vs.set_kind(mode.kind);
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

/// Each algorithm with each of these dtypes and master weights.
fn modes(masters: &[(Kind, MasterWeights)]) -> impl Iterator<Item = Mode> {
    let mode =
        move |algorithm| masters.iter().map(move |(kind, it)| Mode::new(algorithm, *kind, *it));
    algorithms().into_iter().flat_map(mode)
}

/// An optimizer whose state is divided among the ranks of a group, if there is one.
pub(super) fn build(model: &Model, mode: Mode, group: Option<&ProcessGroup>) -> Optimizer {
    let builder = mode.algorithm.master_weights(mode.masters).moments(mode.moments);
    let mut opt = builder.build(&model.vs, 0.05).unwrap();
    assert_eq!(opt.assign_group(1, &["w3", "w0"]).unwrap(), 2);
    opt.set_lr_group(1, 0.025).unwrap();
    if let Some(group) = group {
        opt.shard_over(group).unwrap();
    }
    opt
}

/// What [`Model::train`] makes of a model, and the states of its optimizer.
type Trained = (Vec<Vec<u8>>, Vec<(String, Vec<u8>)>);

fn trained(model: &Model, opt: &mut Optimizer, steps: std::ops::Range<i64>) -> Trained {
    model.train(opt, &mut GradScaler::new(Device::Cpu).unwrap(), steps);
    (model.bits(), state_bits(&opt.state_dict().unwrap()))
}

#[test]
fn sharded_training_is_the_same_and_resumes_with_another_number_of_ranks() {
    let masters = [
        (Kind::Float, MasterWeights::None),
        (Kind::BFloat16, MasterWeights::Float),
        (Kind::BFloat16, MasterWeights::Remainder),
        (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 3 }),
    ];
    let low_bit = [
        Mode::low_bit(AdamW::default(), MomentDtype::EightBit),
        Mode::low_bit(AdamW::default(), MomentDtype::BFloat16),
        Mode::low_bit(Muon::default(), MomentDtype::BFloat16),
    ];
    for mode in modes(&masters).chain(low_bit) {
        let alone = Model::new(mode);
        let mut opt = build(&alone, mode, None);
        let half = trained(&alone, &mut opt, 0..4);
        let whole = trained(&alone, &mut opt, 4..7);
        let mut results = ranks(3, |group| {
            let model = Model::new(mode);
            let mut opt = build(&model, mode, Some(&group));
            let found = trained(&model, &mut opt, 0..4);
            assert_eq!(found.0, half.0, "{mode:?}");
            (found.1, model.weights, opt.state_dict().unwrap())
        });
        let (found, weights, state) = results.remove(0);
        assert_eq!(found, half.1, "{mode:?}");
        let saved = Mutex::new((weights, state));
        for size in [1, 2] {
            let resumed = ranks(size, |group| {
                let model = Model::new(mode);
                let mut opt = build(&model, mode, Some(&group));
                {
                    let saved = saved.lock().unwrap();
                    for (weight, saved) in model.weights.iter().zip(&saved.0) {
                        tch::no_grad(|| weight.shallow_clone().copy_(saved));
                    }
                    opt.load_state_dict(&saved.1).unwrap();
                }
                trained(&model, &mut opt, 4..7)
            });
            assert_eq!(resumed[0], whole, "{mode:?}, {size} ranks");
            assert!(resumed.iter().all(|(bits, _)| *bits == whole.0));
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
        let mode = Mode::plain(AdamW::default());
        let model = Model::new(mode);
        let mut opt = build(&model, mode, Some(&group));
        let mut scaler = GradScaler::disabled();
        model.train(&mut opt, &mut scaler, 0..2);
        let before = model.bits();
        opt.zero_grad().unwrap();
        model.backward(&mut scaler, 3);
        if group.rank() == 1 {
            opt.set_lr(0.5).unwrap();
        }
        let calls = calls(opt.step().unwrap_err());
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
    let masters = [
        (Kind::Float, MasterWeights::None),
        (Kind::BFloat16, MasterWeights::Float),
        (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 3 }),
    ];
    for mode in modes(&masters) {
        let alone = Model::new(mode);
        let expected = trained(&alone, &mut build(&alone, mode, None), 0..5);
        let found = ranks(2, |group| {
            let model = Model::new(mode);
            let mut opt = build(&model, mode, Some(&group));
            let mut scaler = GradScaler::new(Device::Cpu).unwrap();
            for step in 0..5 {
                opt.zero_grad().unwrap();
                model.backward(&mut scaler, step);
                let before = model.bits();
                if group.rank() == 1 {
                    opt.set_lr_group(1, 0.5).unwrap();
                }
                let _calls = calls(opt.step().unwrap_err());
                opt.set_lr_group(1, 0.025).unwrap();
                assert_eq!(model.bits(), before, "{mode:?}");
                let outcome = scaler.step_clip_norm(&mut opt, 2.0).unwrap();
                assert_eq!(outcome.is_stepped().unwrap(), step != 2);
                scaler.update().unwrap();
            }
            (model.bits(), state_bits(&opt.state_dict().unwrap()))
        });
        assert!(found.iter().all(|(bits, _)| *bits == expected.0), "{mode:?}");
        assert_eq!(found[0].1, expected.1, "{mode:?}");
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
            let (mode, mut scaler) = (Mode::plain(Sgd::default()), GradScaler::disabled());
            let model = Model::new(mode);
            let mut opt = build(&model, mode, Some(&group));
            model.train(&mut opt, &mut scaler, 0..2);
            opt.zero_grad().unwrap();
            if group.rank() == 1 {
                change(&model, &mut opt);
            }
            let before = model.bits();
            model.backward(&mut scaler, 3);
            let calls = calls(opt.step().unwrap_err());
            assert!(calls[1].contains(expected), "{calls:?}");
            assert_eq!(model.bits(), before);
        });
    }
}

#[test]
fn only_the_same_parameters_are_divided_and_only_once() {
    ranks(2, |group| {
        let model = Model::new(Mode::plain(AdamW::default()));
        if group.rank() == 1 {
            drop(model.vs.root().zeros("more", &[2]));
        }
        let mut opt = AdamW::default().build(&model.vs, 0.1).unwrap();
        let _calls = calls(opt.shard_over(&group).unwrap_err());
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
            let mode = Mode::new(Sgd::default(), Kind::BFloat16, masters);
            let model = Model::new(mode);
            let mut opt = build(&model, mode, group);
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
            let (mode, mut scaler) = (Mode::plain(AdamW::default()), GradScaler::disabled());
            let model = Model::new(mode);
            let mut opt = build(&model, mode, Some(&group));
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
