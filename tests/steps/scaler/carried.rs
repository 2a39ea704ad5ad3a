//! Gradients that `update` finds unused and that their optimizer steps with later are divided by the scale by which
//! they were multiplied, and all others by the present one. In all tests the learning rate is 0.5 and the gradient of a
//! loss 1, so that a step moves a weight by 0.5.

use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Tensor, no_grad};
use tch_amp::gradients::GradientError;
use tch_amp::optim::{AmpOptimizer, Sgd};
use tch_amp::recompute::checkpointed;
use tch_amp::scaler::{GradScalerConfig, SpikeConfig};
use tch_amp::{Autocast, Error, GradScaler, Result, function};

use crate::scaler::protocol::Failing;
use crate::scaler::{INF, loss, step_and_update};
use testkit::tensors::leaf;
use testkit::{for_each_device, to_f64};

/// A scaler whose scale of 8 doubles in every iteration without an overflow.
fn growing(device: Device) -> GradScaler {
    let config = GradScalerConfig { init_scale: 8.0, growth_interval: 1, ..Default::default() };
    config.build(device).unwrap()
}

/// A weight of one, and its optimizer.
struct Model {
    w: Tensor,
    opt: Box<dyn AmpOptimizer>,
    _vs: VarStore,
}

impl Model {
    fn new(device: Device, fused: bool) -> Self {
        let vs = VarStore::new(device);
        let w = vs.root().ones("w", &[1]);
        let opt: Box<dyn AmpOptimizer> = match fused {
            true => Box::new(Sgd::default().build(&[w.shallow_clone()], 0.5).unwrap()),
            false => Box::new(nn::Sgd::default().build(&vs, 0.5).unwrap()),
        };
        Self { w, opt, _vs: vs }
    }

    fn loss(&self) -> Tensor {
        loss(&self.w, &[1.0])
    }

    fn zero(&mut self) {
        Sgd::default().build(&[self.w.shallow_clone()], 0.0).unwrap().zero_grad().unwrap();
    }

    fn value(&self) -> f64 {
        to_f64(&self.w)[0]
    }
}

/// All kinds of two models, on all devices.
fn for_each_pair(test: impl Fn(Device, bool, Model, Model)) {
    for_each_device(|device| {
        for fused in [false, true] {
            test(device, fused, Model::new(device, fused), Model::new(device, fused));
        }
    });
}

/// A growing scaler after an iteration with the losses of both, in which `a` alone has stepped.
fn after_a_step(device: Device, a: &mut Model, b: &Model) -> GradScaler {
    let mut scaler = growing(device);
    scaler.backward(&(a.loss() + b.loss())).unwrap();
    step_and_update(&mut scaler, &mut *a.opt);
    scaler
}

fn is_mixed<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Gradient(GradientError::MixedScales { .. })))
}

/// A way to step.
type Way = fn(&mut GradScaler, &mut dyn AmpOptimizer) -> Result<()>;

const WAYS: [Way; 5] = [
    |scaler, opt| scaler.step(opt).map(drop),
    |scaler, opt| {
        scaler.unscale_(opt)?;
        scaler.step(opt).map(drop)
    },
    |scaler, opt| scaler.unscale(opt)?.step().map(drop),
    |scaler, opt| scaler.step_clip_norm(opt, 1000.0).map(drop),
    |scaler, opt| scaler.step_clip_value(opt, 1000.0).map(drop),
];

#[test]
fn an_optimizer_that_steps_after_an_update_divides_by_the_scale_of_its_loss() {
    for (way, step) in WAYS.iter().enumerate() {
        for overflows in [false, true] {
            for_each_pair(|device, fused, mut a, mut b| {
                let case = format!("{device:?} fused {fused} way {way} overflows {overflows}");
                let mut scaler = growing(device);
                let of_a = if overflows { &a.w * INF } else { a.loss() };
                for scaled in scaler.scale(&[of_a.sum(None), b.loss()]).unwrap() {
                    scaled.backward();
                }
                step_and_update(&mut scaler, &mut *a.opt);
                step(&mut scaler, &mut *b.opt).unwrap();
                assert_eq!(b.value(), 0.5, "{case}");
                scaler.update().unwrap();
                let factor = if overflows { 1.0 } else { 4.0 };
                assert_eq!(scaler.get_scale().unwrap(), 8.0 * factor, "{case}");
                // The next iterations are like any other, and also with a loss in between.
                for _ in 0..2 {
                    [&mut a, &mut b].into_iter().for_each(Model::zero);
                    scaler.backward(&(a.loss() + b.loss())).unwrap();
                    step_and_update(&mut scaler, &mut *a.opt);
                    a.zero();
                    scaler.backward(&a.loss()).unwrap();
                    step(&mut scaler, &mut *b.opt).unwrap();
                    step_and_update(&mut scaler, &mut *a.opt);
                }
                let moved_a = if overflows { 1.0 } else { 0.5 } - 2.0;
                assert_eq!((a.value(), b.value()), (moved_a, -0.5), "{case}");
            });
        }
    }
}

#[test]
fn an_iteration_in_one_call_leaves_the_gradients_of_others_their_scale() {
    for (way, step) in WAYS.iter().enumerate() {
        for_each_pair(|device, fused, mut a, mut b| {
            let mut scaler = growing(device);
            scaler.backward(&b.loss()).unwrap();
            let of_a = a.loss();
            scaler.backward_step(&mut *a.opt, &of_a).unwrap();
            step(&mut scaler, &mut *b.opt).unwrap();
            assert_eq!((a.value(), b.value()), (0.5, 0.5), "{device:?} fused {fused} way {way}");
        });
    }
}

#[test]
fn regions_do_not_change_what_is_carried() {
    for_each_pair(|device, fused, mut a, mut b| {
        let _region = Autocast::new(device).dtype(tch::Kind::BFloat16).enter().unwrap();
        let mut scaler = after_a_step(device, &mut a, &b);
        scaler.step(&mut *b.opt).unwrap();
        assert_eq!((a.value(), b.value()), (0.5, 0.5), "{device:?} fused {fused}");
    });
}

#[test]
fn a_gradient_keeps_its_scale_over_several_updates_and_however_the_scale_is_set() {
    let changes: [fn(&mut GradScaler) -> Result<()>; 3] = [
        |scaler| scaler.update_with(1024.0),
        |scaler| scaler.update_with_tensor(&Tensor::from(1024f32)),
        |scaler| {
            let mut state = scaler.state_dict()?;
            state.scale = Some(1024.0);
            scaler.load_state_dict(&state)
        },
    ];
    for change in changes {
        for_each_pair(|device, fused, mut a, mut b| {
            let mut scaler = growing(device);
            scaler.backward(&(a.loss() + b.loss())).unwrap();
            for _ in 0..3 {
                a.zero();
                scaler.backward(&a.loss()).unwrap();
                step_and_update(&mut scaler, &mut *a.opt);
            }
            change(&mut scaler).unwrap();
            scaler.step(&mut *b.opt).unwrap();
            assert_eq!((a.value(), b.value()), (-0.5, 0.5), "{device:?} fused {fused}");
        });
    }
}

#[test]
fn a_gradient_of_two_scales_is_refused_before_any_change_and_zeroing_it_helps() {
    for_each_pair(|device, fused, mut a, mut b| {
        if fused && device.is_cuda() {
            // The host knows neither scale.
            return;
        }
        for (way, step) in WAYS.iter().enumerate() {
            let mut scaler = growing(device);
            let losses = if way % 2 == 0 { 1 } else { 2 };
            scaler.backward(&(a.loss() + b.loss())).unwrap();
            step_and_update(&mut scaler, &mut *a.opt);
            for _ in 0..losses {
                a.zero();
                scaler.backward(&(a.loss() + b.loss())).unwrap();
            }
            let before = (b.value(), to_f64(&b.w.grad()));
            assert_eq!(before.1, [8.0 + 16.0 * f64::from(losses)]);
            assert!(is_mixed(step(&mut scaler, &mut *b.opt)), "{device:?} fused {fused} way {way}");
            assert_eq!((b.value(), to_f64(&b.w.grad())), before);
            // Nor after another update, or another loss.
            step_and_update(&mut scaler, &mut *a.opt);
            assert!(is_mixed(scaler.step(&mut *b.opt)), "{device:?} fused {fused} way {way}");
            a.zero();
            scaler.backward(&(a.loss() + b.loss())).unwrap();
            assert!(is_mixed(scaler.unscale_(&mut *b.opt)), "{device:?} fused {fused} way {way}");
            // In place or not.
            if way == 0 {
                b.zero()
            } else {
                b.w.zero_grad()
            }
            scaler.backward(&b.loss()).unwrap();
            step(&mut scaler, &mut *b.opt).unwrap();
            assert_eq!(b.value(), before.0 - 0.5, "{device:?} fused {fused} way {way}");
            b.zero();
        }
    });
}

#[test]
fn gradients_that_were_zeroed_are_new_whenever_and_however_they_were_zeroed() {
    // Before the update, before the loss is scaled, and before its backward.
    for time in 0..3 {
        for in_place in [false, true] {
            for_each_pair(|device, fused, mut a, mut b| {
                let mut scaler = growing(device);
                let zero = |b: &mut Model| if in_place { b.w.zero_grad() } else { b.zero() };
                scaler.backward(&(a.loss() + b.loss())).unwrap();
                scaler.step(&mut *a.opt).unwrap();
                if time == 0 {
                    zero(&mut b);
                }
                scaler.update().unwrap();
                if time == 1 {
                    zero(&mut b);
                }
                let scaled = scaler.scale(&b.loss()).unwrap();
                if time == 2 {
                    zero(&mut b);
                }
                scaled.backward();
                scaler.step(&mut *b.opt).unwrap();
                let case = format!("{device:?} fused {fused} time {time} in place {in_place}");
                assert_eq!(b.value(), 0.5, "{case}");
            });
        }
    }
}

#[test]
fn one_optimizer_divides_each_of_its_gradients_by_the_scale_of_that_one() {
    for_each_device(|device| {
        for fused in [false, true] {
            for way in WAYS.iter().map(Some).chain([None]) {
                let vs = VarStore::new(device);
                let ws: Vec<_> = (0..3).map(|i| vs.root().ones(&format!("w{i}"), &[1])).collect();
                let mut sgd = Sgd::default().build(&ws, 0.5).unwrap();
                let mut host = nn::Sgd::default().build(&vs, 0.5).unwrap();
                let mut a = Model::new(device, fused);
                let mut scaler = growing(device);
                for w in &ws {
                    scaler.backward(&(loss(w, &[1.0]) + a.loss())).unwrap();
                    step_and_update(&mut scaler, &mut *a.opt);
                    a.zero();
                }
                scaler.backward(&a.loss()).unwrap();
                match (way, fused) {
                    (Some(step), true) => step(&mut scaler, &mut sgd).unwrap(),
                    (Some(step), false) => step(&mut scaler, &mut host).unwrap(),
                    (None, true) => {
                        let mut spikes = SpikeConfig::default().build().unwrap();
                        scaler.step_unless_spike(&mut sgd, INF, &mut spikes).unwrap();
                    }
                    (None, false) => continue,
                }
                let values: Vec<_> = ws.iter().flat_map(to_f64).collect();
                let is_spike = way.is_none();
                assert_eq!(values, [0.5; 3], "{device:?} fused {fused} spike {is_spike}");
            }
        }
    });
}

#[test]
fn clipping_takes_the_norm_of_gradients_of_several_scales() {
    for_each_device(|device| {
        let ws = [leaf(&[0.0], tch::Kind::Float, device), leaf(&[0.0], tch::Kind::Float, device)];
        let mut opt = Sgd::default().build(&ws, 1.0).unwrap();
        let mut a = Model::new(device, true);
        let mut scaler = growing(device);
        scaler.backward(&(loss(&ws[0], &[3.0]) + a.loss())).unwrap();
        step_and_update(&mut scaler, &mut *a.opt);
        scaler.backward(&loss(&ws[1], &[4.0])).unwrap();
        let outcome = scaler.step_clip_norm(&mut opt, 1.0).unwrap();
        assert_eq!(to_f64(outcome.total_norm().unwrap()), [5.0], "{device:?}");
        for (w, expected) in ws.iter().zip([-0.6, -0.8]) {
            assert!((to_f64(w)[0] - expected).abs() < 1e-6, "{device:?}: {w:?}");
        }
    });
}

#[test]
fn an_optimizer_that_was_unscaled_before_an_update_is_not_unscaled_again() {
    for grows in [false, true] {
        for again in [false, true] {
            for_each_pair(|device, fused, mut a, mut b| {
                let growth_interval = if grows { 1 } else { 1000 };
                let mut scaler = growing(device);
                scaler.set_growth_interval(growth_interval).unwrap();
                scaler.backward(&(a.loss() + b.loss())).unwrap();
                scaler.unscale_(&mut *b.opt).unwrap();
                step_and_update(&mut scaler, &mut *a.opt);
                if again {
                    scaler.unscale_(&mut *b.opt).unwrap();
                }
                scaler.step(&mut *b.opt).unwrap();
                assert_eq!(b.value(), 0.5, "{device:?} fused {fused} grows {grows} {again}");
            });
        }
    }
}

fn clip(w: &Tensor, factor: f64) {
    let _clipped = no_grad(|| w.grad().g_mul_scalar_(factor));
}

/// What the program does between `unscale_` and an `update` after which the optimizer steps.
type Between = fn(&mut GradScaler, &mut Model, &mut Model);

#[test]
fn gradients_that_the_program_changes_after_unscale_stay_unscaled() {
    let changes: [(&str, Between, f64); 6] = [
        ("clipped below the norm", |_, _, b| clip(&b.w, 1.0), 0.5),
        ("clipped", |_, _, b| clip(&b.w, 0.5), 0.75),
        (
            "clipped after the loss of another",
            |scaler, a, b| {
                scaler.backward(&a.loss()).unwrap();
                clip(&b.w, 0.5);
            },
            0.75,
        ),
        (
            "clipped before the loss of another",
            |scaler, a, b| {
                clip(&b.w, 0.5);
                scaler.backward(&a.loss()).unwrap();
            },
            0.75,
        ),
        (
            "clipped between losses of another",
            |scaler, a, b| {
                scaler.backward(&a.loss()).unwrap();
                clip(&b.w, 0.5);
                scaler.backward(&a.loss()).unwrap();
            },
            0.75,
        ),
        (
            "a loss that is scaled and not used",
            |scaler, _, b| {
                let _unused = scaler.scale(&b.loss()).unwrap();
            },
            0.5,
        ),
    ];
    for (name, change, expected) in changes {
        for_each_pair(|device, fused, mut a, mut b| {
            let mut scaler = growing(device);
            scaler.backward(&(a.loss() + b.loss())).unwrap();
            scaler.unscale_(&mut *b.opt).unwrap();
            change(&mut scaler, &mut a, &mut b);
            step_and_update(&mut scaler, &mut *a.opt);
            scaler.step(&mut *b.opt).unwrap();
            assert_eq!(b.value(), expected, "{device:?} fused {fused}: {name}");
        });
    }
}

#[test]
fn a_sum_with_unscaled_gradients_is_refused_before_and_after_an_update() {
    let orders: [(&str, Between); 3] = [
        ("before the update", |scaler, a, b| {
            scaler.backward(&b.loss()).unwrap();
            step_and_update(scaler, &mut *a.opt);
        }),
        ("after it", |scaler, a, b| {
            step_and_update(scaler, &mut *a.opt);
            scaler.backward(&b.loss()).unwrap();
        }),
        ("two updates before", |scaler, a, b| {
            scaler.backward(&b.loss()).unwrap();
            step_and_update(scaler, &mut *a.opt);
            a.zero();
            scaler.backward(&a.loss()).unwrap();
            step_and_update(scaler, &mut *a.opt);
        }),
    ];
    for (name, order) in orders {
        for_each_pair(|device, fused, mut a, mut b| {
            if fused && device.is_cuda() {
                // The host does not know the scale.
                return;
            }
            let mut scaler = growing(device);
            scaler.backward(&(a.loss() + b.loss())).unwrap();
            scaler.unscale_(&mut *b.opt).unwrap();
            order(&mut scaler, &mut a, &mut b);
            let before = (b.value(), to_f64(&b.w.grad()));
            assert!(is_mixed(scaler.step(&mut *b.opt)), "{device:?} fused {fused}: {name}");
            assert_eq!(
                (b.value(), to_f64(&b.w.grad())),
                before,
                "{device:?} fused {fused}: {name}"
            );
            b.zero();
            scaler.backward(&b.loss()).unwrap();
            scaler.step(&mut *b.opt).unwrap();
            assert_eq!(b.value(), 0.5, "{device:?} fused {fused}: {name}");
        });
    }
}

#[test]
fn gradients_to_which_a_backward_has_added_after_unscale_stay_refused() {
    for_each_pair(|device, fused, mut a, mut b| {
        let mut scaler = growing(device);
        scaler.backward(&(a.loss() + b.loss())).unwrap();
        scaler.unscale_(&mut *b.opt).unwrap();
        scaler.backward(&b.loss()).unwrap();
        // The next loss does not hide what the one before has done.
        scaler.backward(&a.loss()).unwrap();
        let error = scaler.step(&mut *b.opt).unwrap_err();
        let is_changed = matches!(error, Error::Gradient(GradientError::Changed { .. }));
        assert!(is_changed, "{device:?} fused {fused}: {error}");
        scaler.step(&mut *a.opt).unwrap();
    });
}

#[test]
fn gradients_accumulate_over_updates_while_the_scale_stands_still() {
    for_each_pair(|device, fused, mut a, mut b| {
        let mut scaler = growing(device);
        scaler.set_growth_interval(1000).unwrap();
        for iteration in 0..6 {
            a.zero();
            scaler.backward(&(a.loss() + b.loss())).unwrap();
            scaler.step(&mut *a.opt).unwrap();
            if iteration % 2 == 1 {
                scaler.step(&mut *b.opt).unwrap();
                b.zero();
            }
            scaler.update().unwrap();
        }
        assert_eq!((a.value(), b.value()), (-2.0, -2.0), "{device:?} fused {fused}");
    });
}

#[test]
fn gradients_accumulate_over_an_update_after_which_the_scale_is_the_same_again() {
    for_each_pair(|device, fused, mut a, mut b| {
        let mut scaler = after_a_step(device, &mut a, &b);
        scaler.update_with(8.0).unwrap();
        scaler.backward(&b.loss()).unwrap();
        scaler.step(&mut *b.opt).unwrap();
        assert_eq!(b.value(), 0.0, "{device:?} fused {fused}");
    });
}

#[test]
fn gradients_of_another_loss_after_a_step_are_not_added_to_those_of_a_new_scale() {
    // The loss of a generator leaves gradients in the discriminator, which has stepped before.
    for_each_pair(|device, fused, mut g, mut d| {
        if fused && device.is_cuda() {
            return;
        }
        let mut scaler = growing(device);
        scaler.backward(&d.loss()).unwrap();
        scaler.step(&mut *d.opt).unwrap();
        d.zero();
        scaler.backward(&(g.loss() + d.loss())).unwrap();
        step_and_update(&mut scaler, &mut *g.opt);
        scaler.backward(&d.loss()).unwrap();
        assert!(is_mixed(scaler.step(&mut *d.opt)), "{device:?} fused {fused}");
        d.zero();
        scaler.backward(&d.loss()).unwrap();
        scaler.step(&mut *d.opt).unwrap();
        assert_eq!((g.value(), d.value()), (0.5, 0.0), "{device:?} fused {fused}");
    });
}

/// Steps after an update that has doubled the scale, with gradients that something has written since the backward.
fn with_written(device: Device, fused: bool, write: impl Fn(&mut GradScaler, &Tensor)) -> f64 {
    let (mut a, mut b) = (Model::new(device, fused), Model::new(device, fused));
    let mut scaler = growing(device);
    scaler.scale(&(a.loss() + b.loss())).unwrap().backward();
    scaler.step(&mut *a.opt).unwrap();
    write(&mut scaler, &b.w);
    scaler.step(&mut *b.opt).unwrap();
    b.value()
}

fn overwrite(w: &Tensor, value: f64) {
    let _filled = no_grad(|| w.grad().fill_(value));
}

#[test]
fn gradients_that_a_program_has_given_another_scale_are_divided_by_the_present_one() {
    // The first two as by a program that multiplies kept gradients by the quotient of the scales; the others as by one
    // that copies the gradients of other parameters over these.
    let writes: [fn(&mut GradScaler, &Tensor); 5] = [
        |scaler, w| {
            overwrite(w, 16.0);
            scaler.update_with(16.0).unwrap();
        },
        |scaler, w| {
            scaler.update_with(16.0).unwrap();
            overwrite(w, 16.0);
        },
        |scaler, w| {
            scaler.update().unwrap();
            scaler.backward(&loss(w, &[1.0])).unwrap();
            overwrite(w, 16.0);
        },
        |scaler, w| {
            scaler.update().unwrap();
            w.shallow_clone().zero_grad();
            let of_w = loss(w, &[1.0]) * scaler.get_scale().unwrap();
            of_w.backward();
        },
        |scaler, w| {
            scaler.update().unwrap();
            w.shallow_clone().zero_grad();
            let scaled = scaler.scale(&loss(w, &[1.0])).unwrap();
            scaled.backward();
        },
    ];
    for_each_device(|device| {
        for fused in [false, true] {
            for (i, write) in writes.iter().enumerate() {
                assert_eq!(with_written(device, fused, write), 0.5, "{device:?} {fused} {i}");
            }
        }
    });
}

#[test]
fn a_loss_that_the_program_scales_itself_has_the_present_scale() {
    for_each_pair(|device, fused, mut a, _| {
        let mut scaler = growing(device);
        for iteration in 1..=4 {
            a.w.zero_grad();
            (a.loss() * scaler.get_scale().unwrap()).backward();
            step_and_update(&mut scaler, &mut *a.opt);
            assert_eq!(a.value(), 1.0 - 0.5 * f64::from(iteration), "{device:?} fused {fused}");
        }
    });
}

#[test]
fn gradients_that_a_step_has_used_are_not_carried() {
    // The step is in an iteration before the one that changes the scale, or before a state is loaded. Then one copy
    // takes the place of the gradients, whose parameters the loss reaches.
    for loads in [false, true] {
        for_each_pair(|device, fused, mut a, mut b| {
            let mut scaler = growing(device);
            scaler.set_growth_interval(2).unwrap();
            scaler.backward(&(a.loss() + b.loss())).unwrap();
            scaler.step(&mut *a.opt).unwrap();
            step_and_update(&mut scaler, &mut *b.opt);
            b.zero();
            if loads {
                let mut state = scaler.state_dict().unwrap();
                state.scale = Some(16.0);
                scaler.load_state_dict(&state).unwrap();
            } else {
                scaler.backward(&b.loss()).unwrap();
                step_and_update(&mut scaler, &mut *b.opt);
            }
            let _scaled = scaler.scale(&a.loss()).unwrap();
            overwrite(&a.w, 16.0);
            scaler.step(&mut *a.opt).unwrap();
            assert_eq!(a.value(), 0.0, "{device:?} fused {fused} loads {loads}");
        });
    }
}

#[test]
fn a_second_step_with_the_same_gradients_divides_by_the_present_scale() {
    for_each_pair(|device, fused, mut a, _| {
        let mut scaler = growing(device);
        scaler.backward(&a.loss()).unwrap();
        for _ in 0..2 {
            step_and_update(&mut scaler, &mut *a.opt);
        }
        // All but the loops for the CPU unscale in place, so that they divide by 8 first and then by 16.
        let moved = if fused && device == Device::Cpu { 8.0 / 16.0 } else { 1.0 / 16.0 };
        assert_eq!(a.value(), 0.5 - 0.5 * moved, "{device:?} fused {fused}");
    });
}

#[test]
fn master_weights_of_the_program_take_the_gradients_of_its_model() {
    for_each_pair(|device, fused, w, mut master| {
        let mut scaler = growing(device);
        (&master.w * 0.0).sum(None).backward();
        for iteration in 1..=4 {
            let mut of_w = w.w.shallow_clone();
            if of_w.grad().defined() {
                of_w.zero_grad();
            }
            let scaled = scaler.scale(&w.loss()).unwrap();
            scaled.backward();
            no_grad(|| master.w.grad().copy_(&w.w.grad()));
            step_and_update(&mut scaler, &mut *master.opt);
            let expected = 1.0 - 0.5 * f64::from(iteration);
            assert_eq!(master.value(), expected, "{device:?} fused {fused}");
        }
    });
}

#[test]
fn gradients_that_are_made_anew_after_unscale_have_the_present_scale() {
    for_each_pair(|device, fused, mut a, mut b| {
        let mut scaler = growing(device);
        scaler.set_growth_interval(1000).unwrap();
        scaler.backward(&(a.loss() + b.loss())).unwrap();
        scaler.unscale_(&mut *a.opt).unwrap();
        a.w.zero_grad();
        scaler.backward(&a.loss()).unwrap();
        step_and_update(&mut scaler, &mut *b.opt);
        scaler.step(&mut *a.opt).unwrap();
        assert_eq!(a.value(), 0.5, "{device:?} fused {fused}");
    });
}

#[test]
fn nothing_is_mixed_with_a_gradient_of_zeros() {
    // As by a loss whose factor is zero in the first iterations.
    for_each_pair(|device, fused, mut a, mut b| {
        let mut scaler = growing(device);
        scaler.backward(&(a.loss() + b.loss() * 0.0)).unwrap();
        step_and_update(&mut scaler, &mut *a.opt);
        scaler.backward(&b.loss()).unwrap();
        scaler.step(&mut *b.opt).unwrap();
        assert_eq!(b.value(), 0.5, "{device:?} fused {fused}");
    });
}

#[test]
fn fp16_gradients_of_two_scales_are_stepped_with_and_divided_by_the_present_one() {
    for_each_device(|device| {
        let ws = [0, 1].map(|_| leaf(&[1.0], tch::Kind::Half, device));
        let mut opt = Sgd::default().build(&ws, 0.5).unwrap();
        let mut a = Model::new(device, true);
        let mut scaler = growing(device);
        scaler.backward(&(loss(&ws[0], &[1.0]).to_kind(tch::Kind::Float) + a.loss())).unwrap();
        step_and_update(&mut scaler, &mut *a.opt);
        scaler.backward(&loss(&ws[1], &[1.0])).unwrap();
        scaler.step(&mut opt).unwrap();
        assert_eq!([to_f64(&ws[0]), to_f64(&ws[1])], [[0.75], [0.5]], "{device:?}");
    });
}

#[test]
fn a_parameter_that_a_loss_uses_several_times_keeps_its_scale_too() {
    for_each_pair(|device, fused, mut a, mut b| {
        let mut scaler = growing(device);
        let of_b: Tensor = (0..3).map(|_| b.loss()).sum();
        scaler.backward(&(a.loss() + of_b)).unwrap();
        step_and_update(&mut scaler, &mut *a.opt);
        scaler.step(&mut *b.opt).unwrap();
        assert_eq!(b.value(), -0.5, "{device:?} fused {fused}");
    });
}

#[test]
fn a_parameter_that_only_a_recomputed_part_uses_keeps_its_scale_too() {
    for_each_pair(|device, fused, mut a, mut b| {
        let mut scaler = growing(device);
        let (x, w) = (Tensor::ones([1], (tch::Kind::Float, device)), b.w.shallow_clone());
        let of_b: Tensor = checkpointed(&[&x], move |x| Ok(loss(&w, &[1.0]) * x[0])).unwrap();
        scaler.backward(&(a.loss() + of_b.sum(None))).unwrap();
        step_and_update(&mut scaler, &mut *a.opt);
        scaler.step(&mut *b.opt).unwrap();
        assert_eq!(b.value(), 0.5, "{device:?} fused {fused}");
    });
}

#[test]
fn the_backward_of_a_loss_that_was_scaled_before_an_update_is_refused() {
    let changes: [fn(&mut GradScaler) -> Result<()>; 3] = [
        GradScaler::update,
        |scaler| scaler.update_with(1024.0),
        |scaler| scaler.update_with_tensor(&Tensor::from(1024f32)),
    ];
    for change in changes {
        for_each_pair(|device, fused, mut a, mut b| {
            let mut scaler = growing(device);
            let losses = scaler.scale(&[a.loss(), b.loss()]).unwrap();
            losses[0].backward();
            scaler.step(&mut *a.opt).unwrap();
            change(&mut scaler).unwrap();
            losses[1].f_backward().unwrap_err();
            assert!(!b.w.grad().defined(), "{device:?} fused {fused}");
            scaler.backward(&b.loss()).unwrap();
            scaler.step(&mut *b.opt).unwrap();
            assert_eq!(b.value(), 0.5, "{device:?} fused {fused}");
        });
    }
}

#[test]
fn the_gradients_of_several_losses_and_iterations_of_one_scale_are_divided_by_it() {
    for_each_pair(|device, fused, mut a, mut b| {
        if fused && device.is_cuda() {
            // The host does not know that the scale stands still.
            return;
        }
        let mut scaler = growing(device);
        scaler.set_growth_interval(3).unwrap();
        for _ in 0..3 {
            a.zero();
            for loss in scaler.scale(&[a.loss(), b.loss(), b.loss()]).unwrap() {
                loss.backward();
            }
            step_and_update(&mut scaler, &mut *a.opt);
        }
        assert_eq!(scaler.get_scale().unwrap(), 16.0);
        scaler.step(&mut *b.opt).unwrap();
        assert_eq!((a.value(), b.value()), (-0.5, -2.0), "{device:?} fused {fused}");
    });
}

/// Two models after an iteration in which only the first has stepped, and which has doubled the scale of 8.
fn left(device: Device, fused: bool) -> (GradScaler, Model, Model) {
    let (mut a, b) = (Model::new(device, fused), Model::new(device, fused));
    let scaler = after_a_step(device, &mut a, &b);
    a.zero();
    (scaler, a, b)
}

#[test]
fn a_sum_is_refused_however_the_backward_was_called() {
    let backwards: [fn(&GradScaler, &Model); 5] = [
        |scaler, m| scaler.backward(&m.loss()).unwrap(),
        |scaler, m| scaler.backward_retain_graph(&m.loss()).unwrap(),
        |scaler, m| scaler.scale(&m.loss()).unwrap().backward(),
        |scaler, m| {
            let halves = [m.loss() * 0.5, m.loss() * 0.5];
            scaler.scale(&halves).unwrap().iter().for_each(Tensor::backward);
        },
        |scaler, m| {
            // One of them is not used.
            scaler.scale(&[m.loss(), m.loss()]).unwrap()[0].backward();
        },
    ];
    for (way, backward) in backwards.into_iter().enumerate() {
        for_each_pair(|device, fused, _, _| {
            if fused && device.is_cuda() {
                return;
            }
            let (mut scaler, mut a, mut b) = left(device, fused);
            backward(&scaler, &b);
            assert!(is_mixed(scaler.step(&mut *b.opt)), "{device:?} fused {fused} way {way}");
            // A later loss that does not reach it changes nothing, and neither does another update.
            backward(&scaler, &a);
            step_and_update(&mut scaler, &mut *a.opt);
            assert!(is_mixed(scaler.step(&mut *b.opt)), "{device:?} fused {fused} way {way}");
            b.zero();
            backward(&scaler, &b);
            scaler.step(&mut *b.opt).unwrap();
            assert_eq!((a.value(), b.value()), (0.0, 0.5), "{device:?} fused {fused} way {way}");
        });
    }
}

#[test]
fn what_may_be_no_sum_is_not_refused() {
    // A gradient of 16 at the scale of 16, from programs that have written over what was left.
    let copy_gradient = |scaled: &Tensor, b: &Model| {
        let of_b = function::grad(&[scaled], &[&b.w], &Default::default()).unwrap();
        no_grad(|| b.w.grad().copy_(of_b[0].as_ref().unwrap()));
    };
    type Write<'a> = &'a dyn Fn(&GradScaler, &Model);
    let writes: [Write<'_>; 5] = [
        &|scaler: &GradScaler, b: &Model| {
            let both = scaler.scale(&[b.loss(), b.loss()]).unwrap();
            let _zeros = no_grad(|| b.w.grad().zero_());
            both[1].backward();
        },
        &|scaler: &GradScaler, b: &Model| {
            let both = scaler.scale(&[b.loss(), b.loss()]).unwrap();
            copy_gradient(&both[0], b);
        },
        &|scaler: &GradScaler, b: &Model| copy_gradient(&scaler.scale(&b.loss()).unwrap(), b),
        &|scaler: &GradScaler, b: &Model| {
            scaler.backward(&b.loss()).unwrap();
            overwrite(&b.w, 16.0);
        },
        &|scaler: &GradScaler, b: &Model| {
            scaler.backward(&b.loss()).unwrap();
            let _zeros = no_grad(|| b.w.grad().zero_());
            scaler.backward(&b.loss()).unwrap();
        },
    ];
    for_each_pair(|device, fused, _, _| {
        for (i, write) in writes.iter().enumerate() {
            let (mut scaler, _, mut b) = left(device, fused);
            write(&scaler, &b);
            scaler.step(&mut *b.opt).unwrap();
            assert_eq!(b.value(), 0.5, "{device:?} fused {fused} {i}");
        }
    });
}

#[test]
fn the_step_of_a_sum_that_overflows_is_skipped() {
    for_each_pair(|device, fused, _, _| {
        for (way, step) in WAYS.iter().enumerate() {
            let (mut scaler, _, mut b) = left(device, fused);
            scaler.backward(&(b.loss() * INF)).unwrap();
            step(&mut scaler, &mut *b.opt).unwrap();
            scaler.update().unwrap();
            let case = format!("{device:?} fused {fused} way {way}");
            assert_eq!((b.value(), scaler.get_scale().unwrap()), (1.0, 8.0), "{case}");
        }
    });
}

#[test]
fn a_scale_that_is_refused_leaves_gradients_their_scale() {
    for_each_pair(|device, fused, _, _| {
        let (mut scaler, _, mut b) = left(device, fused);
        scaler.update_with(f64::NAN).unwrap_err();
        scaler.update_with(0.0).unwrap_err();
        scaler.step(&mut *b.opt).unwrap();
        assert_eq!(b.value(), 0.5, "{device:?} fused {fused}");
    });
}

#[test]
fn gradients_of_unusual_layouts_are_left_alone() {
    let mut scaler = growing(Device::Cpu);
    let table = Tensor::ones([3, 1], (tch::Kind::Float, Device::Cpu)).set_requires_grad(true);
    let mut a = Model::new(Device::Cpu, true);
    let index = Tensor::from_slice(&[1i64]);
    let of_table = || Tensor::embedding(&table, &index, -1, false, true).sum(None);
    scaler.backward(&(a.loss() + of_table())).unwrap();
    step_and_update(&mut scaler, &mut *a.opt);
    a.zero();
    scaler.backward(&(a.loss() + of_table())).unwrap();
    step_and_update(&mut scaler, &mut *a.opt);
    assert_eq!(a.value(), 0.0);
}

#[test]
fn a_step_that_is_not_taken_leaves_gradients_their_scale() {
    for_each_pair(|device, fused, mut a, mut b| {
        let mut scaler = growing(device);
        scaler.backward(&(a.loss() + b.loss())).unwrap();
        let mut failing = Failing(b.w.shallow_clone());
        scaler.step(&mut failing).unwrap_err();
        step_and_update(&mut scaler, &mut *a.opt);
        scaler.step(&mut *b.opt).unwrap();
        assert_eq!((a.value(), b.value()), (0.5, 0.5), "{device:?} fused {fused}");
    });
}
