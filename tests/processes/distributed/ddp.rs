//! What a distributed model checks.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::distributed::{
    DdpConfig, DistributedDataParallel, DistributedError, ProcessGroup, VariableChange,
};
use tch_amp::gradients::GradientError;
use tch_amp::optim::{MasterWeights, Optimizer, Sgd};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler, Result};

use super::{assert_open, calls, ranks, scaler};
use testkit::tensors::{TIES, tie};
use testkit::to_f64;

fn ones(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

/// Two linear layers without anything random.
fn model(vs: &VarStore) -> (nn::Linear, nn::Linear) {
    let config = nn::LinearConfig { ws_init: nn::Init::Const(0.5), ..Default::default() };
    let layer = |name| nn::linear(vs.root() / name, 2, 2, config);
    (layer("one"), layer("two"))
}

/// A model of one weight, which an optimizer moves by half of its gradient.
struct Single {
    weight: Tensor,
    ddp: DistributedDataParallel,
    opt: Optimizer,
}

impl Single {
    fn new(group: &ProcessGroup, options: DdpConfig) -> Self {
        let vs = VarStore::new(Device::Cpu);
        let weight = vs.root().ones("weight", &[1]);
        let ddp = options.build(group, &vs).unwrap();
        let opt = Sgd::default().build(&vs, 0.5).unwrap();
        Self { weight, ddp, opt }
    }

    /// A pass with a gradient of `factor`, which is averaged.
    fn backward(&mut self, scaler: &mut GradScaler, factor: f64) -> Result<()> {
        step(&mut self.ddp, scaler, || &self.weight * factor)
    }

    /// The same without averaging.
    fn accumulate(&mut self, scaler: &mut GradScaler, factor: f64) -> Result<()> {
        self.ddp.no_sync(|ddp| step(ddp, scaler, || &self.weight * factor))
    }

    fn is_stepped(&mut self, scaler: &mut GradScaler) -> bool {
        scaler.step(&mut self.opt).unwrap().is_stepped().unwrap()
    }

    fn value(&self) -> f64 {
        self.weight.double_value(&[0])
    }

    fn gradient(&self) -> f64 {
        self.weight.grad().double_value(&[0])
    }
}

#[test]
fn different_models_are_refused_with_the_first_difference_on_every_rank() {
    type Change = fn(&mut VarStore);
    let changes: [(Change, &str); 5] = [
        (|vs| drop(vs.root().ones("three", &[2])), "the parameter \"three\", Float [2]"),
        (
            |vs| drop(vs.root().ones_no_train("three", &[2])),
            "the buffer or frozen parameter \"three\", Float [2]",
        ),
        (|vs| vs.variables()["one.bias"].shallow_clone().set_data(&ones(&[3])), "Float [3]"),
        (|vs| vs.bfloat16(), "BFloat16"),
        (
            |vs| drop(vs.variables()["two.bias"].set_requires_grad(false)),
            "the parameter \"two.bias\"",
        ),
    ];
    for (change, expected) in changes {
        ranks(2, |group| {
            let mut vs = VarStore::new(Device::Cpu);
            let _model = model(&vs);
            if group.rank() == 1 {
                change(&mut vs);
            }
            let calls = calls(DistributedDataParallel::new(&group, &vs).unwrap_err());
            assert!(calls.len() == 2 && calls.concat().contains(expected), "{calls:?}");
            // The group can still be used, with models that are the same, and nothing is left of the ones before.
            let vs = VarStore::new(Device::Cpu);
            let (one, two) = model(&vs);
            let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
            let mut opt = Sgd::default().build(&vs, 0.5).unwrap();
            let own = group.rank() as f64 + 1.0;
            let bias = two.bs.as_ref().unwrap();
            let _zero = tch::no_grad(|| bias.shallow_clone().zero_());
            for round in 1..=2 {
                opt.zero_grad().unwrap();
                let loss = ddp.forward(|| two.forward(&one.forward(&(ones(&[1, 2]) * own))));
                ddp.backward(&loss.unwrap().sum(Kind::Float)).unwrap();
                opt.step().unwrap();
                // Its gradient is 1 on every rank.
                assert_eq!(bias.double_value(&[0]), -0.5 * f64::from(round));
            }
        });
    }
}

#[test]
fn a_model_that_differs_on_the_last_rank_alone_is_shown() {
    ranks(3, |group| {
        let vs = VarStore::new(Device::Cpu);
        let size = if group.rank() == 2 { 4 } else { 3 };
        let _weight = vs.root().ones("weight", &[size]);
        let calls = calls(DistributedDataParallel::new(&group, &vs).unwrap_err());
        assert!(calls[1].contains("Float [3]") && calls[2].contains("Float [4]"), "{calls:?}");
    });
}

#[test]
fn models_whose_names_are_exchanged_are_refused() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let names = if group.rank() == 0 { ["a", "b"] } else { ["b", "a"] };
        let _weights = names.map(|name| vs.root().ones(name, &[3]));
        let calls = calls(DistributedDataParallel::new(&group, &vs).unwrap_err());
        assert!(calls[0].contains("\"a\"") && calls[1].contains("\"b\""), "{calls:?}");
    });
}

#[test]
fn different_options_and_unusable_ones_are_refused() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let _model = model(&vs);
        let unused = DdpConfig { find_unused_parameters: group.rank() == 0, ..Default::default() };
        let calls = calls(unused.build(&group, &vs).unwrap_err());
        assert!(calls[0].contains("find_unused_parameters: true"), "{calls:?}");
        for wrong in [
            DdpConfig { compression: Some(Kind::Float), ..Default::default() },
            DdpConfig { bucket_cap_mb: Some(0.0), ..Default::default() },
            DdpConfig { bucket_cap_mb: Some(f64::NAN), ..Default::default() },
        ] {
            let refused = wrong.build(&group, &vs).unwrap_err();
            assert!(matches!(refused, Error::InvalidArgument { .. }), "{refused}");
        }
        let empty = DistributedDataParallel::new(&group, &VarStore::new(Device::Cpu)).unwrap_err();
        assert!(matches!(empty, Error::InvalidArgument { name: "vs", .. }), "{empty}");
    });
}

#[test]
fn all_variables_become_those_of_rank_0_and_frozen_ones_stay() {
    ranks(3, |group| {
        let vs = VarStore::new(Device::Cpu);
        let value = group.rank() as f64 + 1.0;
        let root = vs.root();
        let weight = root.var("weight", &[3], nn::Init::Const(value));
        let frozen = root.var("frozen", &[3], nn::Init::Const(value)).set_requires_grad(false);
        let mut buffer = root.ones_no_train("buffer", &[3]) * value;
        tch::no_grad(|| vs.variables()["buffer"].shallow_clone().copy_(&buffer));
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        buffer = vs.variables()["buffer"].shallow_clone();
        for tensor in [&weight, &frozen, &buffer] {
            assert_eq!(tensor.double_value(&[2]), 1.0);
        }
        let loss = ddp.forward(|| (&weight * value + &frozen).sum(Kind::Float)).unwrap();
        ddp.backward(&loss).unwrap();
        // (1 + 2 + 3) / 3
        assert_eq!(weight.grad().double_value(&[1]), 2.0);
        assert!(!frozen.grad().defined());
    });
}

#[test]
fn parameters_that_change_afterwards_are_errors_that_name_them() {
    type Change = fn(&mut VarStore);
    let changes: [(Change, &str, VariableChange); 5] = [
        (|vs| drop(vs.root().ones("three", &[2])), "a variable", VariableChange::Added),
        (|vs| vs.half(), "one.", VariableChange::Cast),
        (
            |vs| drop(vs.variables()["frozen"].set_requires_grad(true)),
            "frozen",
            VariableChange::Unfrozen,
        ),
        (
            |vs| drop(vs.variables()["two.bias"].set_requires_grad(false)),
            "two.bias",
            VariableChange::Frozen,
        ),
        (
            |vs| vs.variables()["two.weight"].shallow_clone().set_data(&ones(&[1, 2])),
            "two.weight",
            VariableChange::Reshaped,
        ),
    ];
    for (change, who, expected) in changes {
        ranks(1, |group| {
            let mut vs = VarStore::new(Device::Cpu);
            let _model = model(&vs);
            let _frozen = vs.root().ones("frozen", &[2]).set_requires_grad(false);
            let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
            ddp.forward(|| ()).unwrap();
            change(&mut vs);
            let error = ddp.forward(|| unreachable!("it ran")).unwrap_err();
            let Error::Distributed(DistributedError::Parameter { name, change: what }) = &error
            else {
                panic!("{error}");
            };
            assert!(name.starts_with(who) && *what == expected, "{error}");
        });
    }
}

/// As in PyTorch, whose `will_sync_module_buffers` asks whether the last pass was recorded.
#[test]
fn buffers_are_not_copied_after_a_pass_without_gradients() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let _weight = vs.root().ones("weight", &[1]);
        let mut buffer = vs.root().zeros_no_train("buffer", &[1]);
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let own = group.rank() as f64 + 1.0;
        let mut after = |records: bool| {
            let _filled = tch::no_grad(|| buffer.fill_(own));
            let _mode = (!records).then(tch::no_grad_guard);
            ddp.forward(|| ()).unwrap();
            buffer.double_value(&[0])
        };
        let seen = [true, false, false, true, true].map(&mut after);
        assert_eq!(seen, [1.0, 1.0, own, own, 1.0]);
    });
}

#[test]
fn an_unused_parameter_is_an_error_at_once_that_names_it() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let (one, two) = model(&vs);
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let loss = ddp.forward(|| one.forward(&ones(&[2, 2])).sum(Kind::Float)).unwrap();
        let error = ddp.backward(&loss).unwrap_err();
        let Error::Distributed(DistributedError::Unused { names, rank, .. }) = &error else {
            panic!("{error}");
        };
        assert_eq!((names, *rank), (&vec!["two.bias".into(), "two.weight".into()], group.rank()));
        drop((ddp, two));
    });
}

fn step(
    ddp: &mut DistributedDataParallel,
    scaler: &mut GradScaler,
    loss: impl FnOnce() -> Tensor,
) -> Result<()> {
    let loss = ddp.forward(loss)?;
    ddp.backward_scaled(scaler, &loss)
}

#[test]
fn gradients_of_one_rank_alone_are_neither_unscaled_nor_stepped() {
    for enabled in [true, false] {
        ranks(2, |group| {
            let mut model = Single::new(&group, DdpConfig::default());
            let config = GradScalerConfig { init_scale: 8.0, enabled, ..Default::default() };
            let mut scaler = config.build(Device::Cpu).unwrap();
            let own = group.rank() as f64 + 1.0;
            model.accumulate(&mut scaler, own).unwrap();
            assert!(is_unsynced(scaler.unscale_(&mut model.opt)));
            assert!(is_unsynced(scaler.step(&mut model.opt)));
            assert!(is_unsynced(scaler.step_clip_norm(&mut model.opt, 1.0)));
            assert!(is_unsynced(scaler.unscale(&mut model.opt).map(drop)));
            model.backward(&mut scaler, own).unwrap();
            assert!(model.is_stepped(&mut scaler));
            scaler.update().unwrap();
            // Both passes of both ranks: 1 - 0.5 * (1 + 2 + 1 + 2) / 2.
            assert_eq!(model.value(), -0.5);
        });
    }
}

#[test]
fn gradients_are_not_stepped_after_a_parameter_was_unused() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let used = vs.root().ones("used", &[1]);
        let _unused = vs.root().ones("unused", &[1]);
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let mut opt = Sgd::default().build(&vs, 0.5).unwrap();
        let mut scaler = GradScaler::new(Device::Cpu).unwrap();
        let error = step(&mut ddp, &mut scaler, || &used * 1.0).unwrap_err();
        assert!(matches!(error, Error::Distributed(DistributedError::Unused { .. })), "{error}");
        assert!(is_unsynced(scaler.step(&mut opt)));
    });
}

/// Whether a scaler refuses because gradients are not averaged yet.
fn is_unsynced<T: std::fmt::Debug>(refused: Result<T>) -> bool {
    matches!(refused.unwrap_err(), Error::Gradient(GradientError::Unsynced))
}

#[test]
fn a_model_that_accumulates_does_not_keep_another_one_from_stepping() {
    let fixed =
        GradScalerConfig { init_scale: 8.0, min_scale: 8.0, max_scale: 8.0, ..Default::default() };
    let adaptive = GradScalerConfig { init_scale: 8.0, growth_interval: 1, ..Default::default() };
    for (config, updates) in
        [(fixed, true), (GradScalerConfig { enabled: false, ..fixed }, true), (adaptive, false)]
    {
        ranks(2, |group| {
            let [mut one, mut two] = [(); 2].map(|()| Single::new(&group, DdpConfig::default()));
            let weights = [&one, &two].map(|model| model.weight.shallow_clone());
            let mut both = Sgd::default().build(&weights, 0.5).unwrap();
            let mut scaler = config.build(Device::Cpu).unwrap();
            let own = group.rank() as f64;
            one.accumulate(&mut scaler, own).unwrap();
            two.backward(&mut scaler, own).unwrap();
            assert!(is_unsynced(scaler.unscale_(&mut one.opt)));
            assert!(is_unsynced(scaler.step(&mut one.opt)));
            assert!(is_unsynced(scaler.step(&mut both)));
            assert!(two.is_stepped(&mut scaler));
            assert_eq!(two.value(), 1.0 - 0.5 * 0.5);
            // Otherwise the two batches of the first model would have different scales.
            if updates {
                scaler.update().unwrap();
            } else {
                let refused = scaler.update().unwrap_err();
                assert!(refused.to_string().contains("a scaler of its own"), "{refused}");
                assert_eq!(scaler.get_scale().unwrap(), 8.0);
            }
            one.backward(&mut scaler, own).unwrap();
            assert!(one.is_stepped(&mut scaler));
            assert_eq!(one.value(), 1.0 - 0.5 * (0.5 + 0.5));
            scaler.update().unwrap();
        });
    }
}

/// Of two models, the first accumulates, is zeroed, and is left out of the loop from then on.
#[test]
fn a_model_whose_sum_was_dropped_does_not_keep_the_scale() {
    ranks(2, |group| {
        let [mut one, mut two] = [(); 2].map(|()| Single::new(&group, DdpConfig::default()));
        let config = GradScalerConfig { init_scale: 8.0, growth_interval: 1, ..Default::default() };
        let mut scaler = config.build(Device::Cpu).unwrap();
        one.accumulate(&mut scaler, 1.0).unwrap();
        two.backward(&mut scaler, 1.0).unwrap();
        assert!(two.is_stepped(&mut scaler));
        assert!(is_unsynced(scaler.update()));
        one.opt.zero_grad().unwrap();
        scaler.update().unwrap();
        assert_eq!(scaler.get_scale().unwrap(), 16.0);
        for _ in 0..2 {
            two.opt.zero_grad().unwrap();
            two.backward(&mut scaler, 1.0).unwrap();
            assert!(two.is_stepped(&mut scaler));
            scaler.update().unwrap();
        }
        assert_eq!(two.value(), 1.0 - 3.0 * 0.5);
        // It has a sum again.
        one.accumulate(&mut scaler, 1.0).unwrap();
        assert!(is_unsynced(scaler.unscale_(&mut one.opt)));
        assert!(is_unsynced(scaler.update_with(4.0)));
    });
}

#[test]
fn an_inner_no_sync_does_not_end_the_outer_one() {
    ranks(2, |group| {
        let mut model = Single::new(&group, DdpConfig::default());
        let mut scaler = scaler(8.0);
        let own = group.rank() as f64 + 1.0;
        for _ in 0..2 {
            model.opt.zero_grad().unwrap();
            let weight = model.weight.shallow_clone();
            let mut pass = |ddp: &mut DistributedDataParallel| {
                step(ddp, &mut scaler, || &weight * own).unwrap();
                weight.grad().double_value(&[0]) / 8.0
            };
            let seen = model.ddp.no_sync(|ddp| {
                let innermost = ddp.no_sync(|ddp| ddp.no_sync(&mut pass));
                let between = pass(ddp);
                let fails = std::panic::AssertUnwindSafe(|| ddp.no_sync(|_| panic!("on purpose")));
                assert!(std::panic::catch_unwind(fails).is_err());
                [innermost, between, pass(ddp)]
            });
            assert_eq!(seen, [own, 2.0 * own, 3.0 * own], "of this rank alone");
            assert!(is_unsynced(scaler.step(&mut model.opt)));
            model.backward(&mut scaler, own).unwrap();
            // All four passes of both ranks.
            assert_eq!(model.gradient() / 8.0, 4.0 * (1.0 + 2.0) / 2.0);
            assert!(model.is_stepped(&mut scaler));
            scaler.update().unwrap();
        }
        assert_eq!(model.value(), 1.0 - 2.0 * 0.5 * 6.0);
    });
}

#[test]
fn no_sync_ends_with_a_panic() {
    ranks(2, |group| {
        let mut model = Single::new(&group, DdpConfig::default());
        let panics = std::panic::AssertUnwindSafe(|| model.ddp.no_sync(|_| panic!("on purpose")));
        assert!(std::panic::catch_unwind(panics).is_err());
        model.backward(&mut GradScaler::disabled(), group.rank() as f64).unwrap();
        assert_eq!(model.gradient(), 0.5);
    });
}

#[test]
fn dividing_first_keeps_what_fp16_cannot_hold() {
    for divide_first in [false, true] {
        ranks(4, |group| {
            let options = DdpConfig { compression: Some(Kind::Half), ..Default::default() };
            let mut model = Single::new(&group, DdpConfig { divide_first, ..options });
            let factor = if group.rank() == 0 { 80_000.0 } else { 0.0 };
            model.backward(&mut GradScaler::disabled(), factor).unwrap();
            // fp16 ends at 65504.
            let expected = if divide_first { 20_000.0 } else { f64::INFINITY };
            assert_eq!(model.gradient(), expected);
        });
    }
}

#[test]
fn scalers_become_that_of_rank_0() {
    ranks(3, |group: ProcessGroup| {
        let mut scaler = scaler([1024.0, 8.0, 16.0][group.rank()]);
        group.broadcast_scaler(&mut scaler).unwrap();
        assert_eq!(scaler.get_scale().unwrap(), 1024.0);
        let mut other = if group.rank() == 2 { GradScaler::disabled() } else { scaler };
        let refused = group.broadcast_scaler(&mut other).unwrap_err();
        assert_eq!(calls(refused).len(), 3);
        assert_open(&group);
    });
}

#[test]
fn a_plain_backward_averages_the_gradients() {
    ranks(2, |group| {
        let mut model = Single::new(&group, DdpConfig::default());
        let weight = model.weight.shallow_clone();
        let loss = |value: f64| &weight * (value + group.rank() as f64);
        for step in 1..4 {
            model.ddp.forward(|| loss(2.0)).unwrap().backward();
            assert_eq!(model.gradient(), 2.5 * f64::from(step));
        }
        // Within no_sync it adds this rank's own gradient.
        model.ddp.no_sync(|ddp| ddp.forward(|| loss(1.0)).unwrap().backward());
        assert_eq!(model.gradient(), 8.5 + group.rank() as f64);
    });
}

#[test]
fn ranks_that_run_different_passes_get_an_error_that_names_them() {
    ranks(2, |group| {
        let stores = [VarStore::new(Device::Cpu), VarStore::new(Device::Cpu)];
        let weights =
            [0, 1].map(|i| stores[i].root().var("w", &[3 + 4 * i as i64], nn::Init::Const(1.0)));
        let buffer = stores[1].root().ones_no_train("buffer", &[2]);
        let mut models = [0, 1].map(|i| DistributedDataParallel::new(&group, &stores[i]).unwrap());
        let mine = group.rank();
        let mut backward = |model: usize| {
            let loss = models[model].forward(|| weights[model].sum(Kind::Float))?;
            models[model].backward(&loss)
        };
        // The second pass of a model communicates as well, to rebuild its buckets.
        for model in [0, 1, 0, 1] {
            backward(model).unwrap();
        }
        // Rank 0 runs the backward pass of the model without buffers, rank 1 the forward pass of the other.
        let calls = calls(backward(mine).unwrap_err());
        assert_eq!(calls[0], "the backward pass of DistributedDataParallel 0");
        assert_eq!(calls[1], "the forward pass of DistributedDataParallel 1");
        // Nothing was communicated, so that both go on.
        for model in [0, 1] {
            backward(model).unwrap();
        }
        assert_eq!(weights[1].grad().double_value(&[6]), 3.0);
        drop(buffer);
    });
}

#[test]
fn several_backward_passes_of_a_forward_pass_are_all_averaged() {
    ranks(2, |group| {
        let Single { weight, mut ddp, mut opt } = Single::new(&group, DdpConfig::default());
        let mut scaler = scaler(1.0);
        for step in 0..4 {
            opt.zero_grad().unwrap();
            let loss = || &weight * (1.0 + group.rank() as f64);
            let (one, other) = ddp.forward(|| (loss(), loss() * 2.0)).unwrap();
            if step % 2 == 0 {
                one.backward();
            } else {
                ddp.backward_scaled(&mut scaler, &one).unwrap();
            }
            ddp.backward_scaled(&mut scaler, &other).unwrap();
            assert_eq!(weight.grad().double_value(&[0]), 1.5 + 3.0);
        }
    });
}

#[test]
fn gradients_that_an_optimizer_keeps_in_f32_are_averaged_and_stay_f32() {
    for (view, unused) in [(false, false), (true, false), (false, true)] {
        ranks(2, |group| {
            let mut vs = VarStore::new(Device::Cpu);
            let weight = vs.root().var("weight", &[3], nn::Init::Const(1.0));
            vs.bfloat16();
            let options = DdpConfig { gradient_as_bucket_view: view, ..Default::default() };
            let mut ddp =
                DdpConfig { find_unused_parameters: unused, ..options }.build(&group, &vs).unwrap();
            let builder = Sgd::default().master_weights(MasterWeights::Float);
            let mut opt = builder.build(&vs, 0.0).unwrap();
            opt.accumulate_in_f32().unwrap();
            let mut scaler = scaler(1.0);
            for step in 0..3 {
                opt.zero_grad().unwrap();
                let mut backward = |ddp: &mut DistributedDataParallel, value: f64| {
                    let loss = ddp.forward(|| weight.sum(Kind::Float) * value).unwrap();
                    ddp.backward_scaled(&mut scaler, &loss).unwrap();
                };
                // In bf16, 256 + 1 would stay 256.
                ddp.no_sync(|ddp| backward(ddp, 256.0));
                ddp.no_sync(|ddp| backward(ddp, 1.0));
                assert_eq!(weight.grad().double_value(&[0]), 257.0, "step {step}");
                backward(&mut ddp, 1.0 + 2.0 * group.rank() as f64);
                // Averaged in bf16: (256 + 2 or so) and rounded.
                assert_eq!(weight.grad().kind(), Kind::Float);
                assert!((weight.grad().double_value(&[0]) - 258.0).abs() <= 2.0);
                drop(scaler.step_clip_norm(&mut opt, 1.0).unwrap());
                scaler.update().unwrap();
            }
        });
    }
}

#[test]
fn a_tied_weight_is_averaged_once() {
    for way in TIES {
        ranks(2, |group| {
            let vs = VarStore::new(Device::Cpu);
            let (one, two) = model(&vs);
            tie(&vs, way, "another", &one.ws);
            let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
            let x = ones(&[1, 2]) * (group.rank() as i64 + 1);
            for _ in 0..2 {
                let y = ddp.forward(|| two.forward(&one.forward(&x))).unwrap();
                one.ws.shallow_clone().zero_grad();
                ddp.backward(&y.sum(Kind::Float)).unwrap();
                // The mean of the inputs, each of which reaches two outputs with a weight of 0.5.
                assert_eq!(to_f64(&one.ws.grad()), [1.5; 4], "{way:?}");
            }
        });
    }
}
