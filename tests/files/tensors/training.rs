//! Averages of weights, micro-batches and watched losses.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::accumulation::Accumulation;
use tch_amp::average::{Ema, Swa};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::distributed::DistributedDataParallel;
use tch_amp::insight::{Budget, ScaleHistory, Tracer, Tuner, audit};
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::scaler::{PerLossScalers, SpikeConfig};
use tch_amp::{Autocast, Error, GradScaler};

use crate::tensors::{group, with_each_kind, witness};
use testkit::ranks::ranks;
use testkit::to_f64;

#[test]
fn averaged_weights() {
    // The weight is another tensor before or after its average is made.
    for early in [true, false] {
        let what = format!("an average, early: {early}");
        let taken = with_each_kind(&what, |tensor| {
            let vs = VarStore::new(Device::Cpu);
            let other = vs.root().ones("other", &[2]);
            let mut w = vs.root().zeros("w", &[2, 3]);
            let mut average = Ema { decay: 0.5, ..Ema::default() }.build(&vs)?;
            let replaced = no_grad(|| w.f_set_data(&tensor)).is_ok();
            if early {
                average = Ema { decay: 0.5, ..Ema::default() }.build(&vs)?;
            }
            let before = to_f64(&other);
            let moved = average.advance();
            if moved.is_err() && replaced {
                assert_eq!(average.updates()?, 0);
            }
            let swapped = average.swap_in().map(drop);
            assert_eq!(to_f64(&other), before);
            average.copy_to_model()?;
            moved.and(swapped)
        });
        taken.includes(&["f32", "bf16", "f16"]);
        // It has another shape.
        assert_eq!(taken.kinds.contains(&"transposed"), early);
    }
}

#[test]
fn losses_of_micro_batches() {
    let taken = with_each_kind("the loss of a micro-batch", |tensor| {
        let mut window = Accumulation::of_equal(1)?;
        let weighed = window.weigh(&tensor);
        assert_eq!(window.is_complete(), weighed.is_ok());
        weighed.map(drop)
    });
    taken.includes(&["of no dimensions"]);
}

#[test]
fn gradients_of_micro_batches() {
    with_each_kind("a weight of micro-batches", |tensor| {
        let w = witness();
        let mut list = vec![w.shallow_clone()];
        list.push(tensor.f_set_requires_grad(true).unwrap_or(witness()));
        let opt = Sgd::default().build(list, 1.0)?;
        let mut window = Accumulation::of_equal(1)?;
        let mut scaler = GradScaler::new(Device::Cpu)?;
        window.backward_or_drop(&mut scaler, &opt, &(&w * 2.0).sum(Kind::Float))
    });
}

#[test]
fn saved_gradients_of_micro_batches() {
    let named = |w: Tensor| [("w".to_owned(), w)];
    with_each_kind("a weight of a saved window", |tensor| {
        let mut window = Accumulation::of_equal(2)?;
        // One has a gradient, and one gets it from the checkpoint of a usual parameter.
        let w = tensor.f_set_requires_grad(true).unwrap_or(tensor);
        let mut checkpoint = Checkpoint::new();
        let mut scaler = GradScaler::disabled();
        if let Ok(loss) = w.f_sum(Kind::Float) {
            let _failed = window.backward(&mut scaler, &loss);
        }
        checkpoint.add("window", &mut window.with_gradients(named(w.shallow_clone())))?;
        let restore = |window: &mut Accumulation, w: &Tensor, checkpoint: &Checkpoint| {
            let mut window = window.with_gradients(named(w.shallow_clone()));
            checkpoint.restore().add("window", &mut window).apply().map(drop)
        };
        restore(&mut window, &w, &checkpoint)?;
        let usual = witness();
        let mut other = Accumulation::of_equal(3)?;
        other.backward(&mut scaler, &(&usual * 2.0).sum(Kind::Float))?;
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("window", &mut other.with_gradients(named(usual)))?;
        let restored = restore(&mut window, &w, &checkpoint);
        assert_eq!(window.micro_batches() == 3, restored.is_ok());
        restored
    });
}

#[test]
fn watched_losses() {
    let taken = with_each_kind("a watched loss", |tensor| {
        let w = witness();
        let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0)?;
        let mut scaler = GradScaler::new(Device::Cpu)?;
        let mut spikes = SpikeConfig::default().build()?;
        spikes.watch_loss(&tensor);
        scaler.backward(&(&w * 2.0).sum(Kind::Float))?;
        let stepped = scaler.step_unless_spike(&mut opt, 1.0, &mut spikes).map(drop);
        if stepped.is_err() {
            assert_eq!(to_f64(&w), [1.0, 2.0]);
        }
        stepped
    });
    taken.includes(&["of no dimensions"]);
}

#[test]
fn averages_of_buffers() {
    let taken = with_each_kind("an average of buffers", |tensor| {
        let vs = VarStore::new(Device::Cpu);
        let _other = vs.root().ones("other", &[2]);
        let mut running = vs.root().zeros_no_train("running_mean", &[2, 3]);
        drop(no_grad(|| running.f_set_data(&tensor)));
        let mut swa = Swa { use_buffers: true }.build(&vs)?;
        swa.advance()
    });
    taken.includes(&["f32", "i64"]);
}

/// Makes a scaler in each of its modes.
fn scalers() -> [GradScaler; 3] {
    [
        GradScaler::new(Device::Cpu).unwrap(),
        GradScaler::skip_only(Device::Cpu).unwrap(),
        GradScaler::disabled(),
    ]
}

/// Asserts that an undefined loss is refused as such, by a call that leaves the weight and its gradient as they are.
fn assert_undefined_is_refused(
    what: &str,
    call: impl FnOnce(&mut Optimizer, &Tensor) -> tch_amp::Result<()>,
) {
    let w = witness();
    let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
    (&w * 2.0).sum(Kind::Float).backward();
    let called = call(&mut opt, &Tensor::new());
    let text = match &called {
        Err(error @ Error::InvalidArgument { name: "loss" | "the watched loss", .. }) => {
            error.to_string()
        }
        other => panic!("{what}: {other:?}"),
    };
    let said = "loss is an undefined tensor, such as `Tensor::new()` or the gradient of an unused parameter; pass one";
    assert!(text.contains(said), "{what}: {text}");
    assert_eq!((to_f64(&w), to_f64(&w.grad())), (vec![1.0, 2.0], vec![2.0, 2.0]), "{what}");
}

#[test]
fn an_undefined_loss_is_refused_wherever_a_loss_is_taken() {
    type Call = fn(&mut GradScaler, &mut Optimizer, &Tensor) -> tch_amp::Result<()>;
    let calls: [(&str, Call); 9] = [
        ("backward", |scaler, _, loss| scaler.backward(loss)),
        ("backward_retain_graph", |scaler, _, loss| scaler.backward_retain_graph(loss)),
        ("backward_step", |scaler, opt, loss| scaler.backward_step(opt, loss).map(drop)),
        ("backward_step_clip_norm", |scaler, opt, loss| {
            scaler.backward_step_clip_norm(opt, loss, 1.0).map(drop)
        }),
        ("backward_step_clip_value", |scaler, opt, loss| {
            scaler.backward_step_clip_value(opt, loss, 1.0).map(drop)
        }),
        ("a window", |scaler, _, loss| Accumulation::of_equal(2)?.backward(scaler, loss)),
        ("a window that drops", |scaler, opt, loss| {
            Accumulation::of_equal(2)?.backward_or_drop(scaler, opt, loss)
        }),
        ("a weighed loss", |_, _, loss| Accumulation::of_equal(2)?.weigh(loss).map(drop)),
        ("a watched loss", |scaler, opt, loss| {
            let mut spikes = SpikeConfig::default().build()?;
            spikes.watch_loss(loss);
            scaler.step_unless_spike(opt, 1.0, &mut spikes).map(drop)
        }),
    ];
    for (what, call) in calls {
        for mut scaler in scalers() {
            let what = format!("{what}, {scaler:?}");
            assert_undefined_is_refused(&what, |opt, loss| call(&mut scaler, opt, loss));
        }
    }
    let [enabled, skips, _] = scalers();
    for scaler in [enabled, skips] {
        assert_undefined_is_refused("scale", |_, loss| scaler.scale(loss).map(drop));
        assert_undefined_is_refused("scale of a tree", |_, loss| {
            let tree = (witness().sum(Kind::Float), vec![Some(loss.shallow_clone())]);
            scaler.scale(&tree).map(drop)
        });
    }
    assert_undefined_is_refused("several scalers", |opt, loss| {
        PerLossScalers::new(Device::Cpu, 2)?.backward(1, loss, opt)
    });
    assert_undefined_is_refused("several scalers, with the graph", |opt, loss| {
        PerLossScalers::new(Device::Cpu, 2)?.backward_retain_graph(0, loss, opt)
    });
    assert_undefined_is_refused("an optimizer", |opt, loss| opt.backward_step(loss));
    assert_undefined_is_refused("clip", |opt, loss| opt.backward_step_clip(loss, 1.0));
    assert_undefined_is_refused("clip_norm", |opt, loss| opt.backward_step_clip_norm(loss, 1.0));
    assert_undefined_is_refused("a history", |_, loss| ScaleHistory::new(2)?.set_loss(loss));
}

#[test]
fn an_undefined_loss_is_refused_by_a_model_of_several_ranks() {
    let group = group();
    let vs = VarStore::new(Device::Cpu);
    let w = vs.root().ones("w", &[2]);
    let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
    for mut scaler in scalers() {
        for syncs in [true, false] {
            assert_undefined_is_refused("backward", |_, loss| match syncs {
                true => ddp.backward(loss),
                false => ddp.no_sync(|ddp| ddp.backward(loss)),
            });
            assert_undefined_is_refused("backward_scaled", |_, loss| match syncs {
                true => ddp.backward_scaled(&mut scaler, loss),
                false => ddp.no_sync(|ddp| ddp.backward_scaled(&mut scaler, loss)),
            });
        }
        assert_undefined_is_refused("backward_by", |_, loss| ddp.backward_by(loss, || Ok(())));
        // The model can still be used.
        let loss = ddp.forward(|| (&w * 3.0).sum(Kind::Float)).unwrap();
        ddp.backward_scaled(&mut scaler, &loss).unwrap();
        vs.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
    }
}

/// The others do not wait for it, and all can go on.
#[test]
fn an_undefined_loss_of_one_rank_is_an_error_on_all() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let w = vs.root().ones("w", &[2]);
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let rank = group.rank();
        for wrong in [0, 1] {
            let loss = ddp.forward(|| (&w * 3.0).sum(Kind::Float)).unwrap();
            let loss = if rank == wrong { Tensor::new() } else { loss };
            let text = ddp.backward(&loss).unwrap_err().to_string();
            assert!(text.contains("loss is an undefined tensor"), "rank {rank}: {text}");
            assert!(!w.grad().defined());
        }
        let loss = ddp.forward(|| (&w * 3.0).sum(Kind::Float)).unwrap();
        ddp.backward(&loss).unwrap();
        assert_eq!(to_f64(&w.grad()), [3.0, 3.0]);
    });
}

#[test]
fn an_undefined_loss_is_refused_by_the_tools_that_run_an_iteration() {
    let vs = VarStore::new(Device::Cpu);
    let _w = vs.root().ones("w", &[2]);
    let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
    let off = GradScaler::disabled();
    assert_undefined_is_refused("audit", |_, _| {
        audit(&vs, &region, &off, |_| Ok(Tensor::new())).map(drop)
    });
    assert_undefined_is_refused("tune", |_, _| {
        Tuner::default().tune(&vs, &region, &off, |_| Ok(Tensor::new())).map(drop)
    });
    assert_undefined_is_refused("a tracer", |_, _| {
        let mut tracer = Tracer::new(&vs)?;
        tracer.begin(&off)?;
        tracer.explain(&off, || Ok(Tensor::new())).map(drop)
    });
    assert_undefined_is_refused("a budget", |_, _| {
        let optimizer = || Sgd::default().build(&vs, 1.0);
        Budget::new(&vs, region).measure(optimizer, |_, _| Ok(Tensor::new())).map(drop)
    });
}
