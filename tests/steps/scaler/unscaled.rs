//! Between unscaling and stepping: clipping, and changes that must be detected.

use tch::{Device, Kind, Tensor};
use tch_amp::gradients::GradientError::Changed;
use tch_amp::optim::AmpOptimizer;
use tch_amp::scaler::ScalerError;
use tch_amp::{Error, GradScaler};

use crate::scaler::{
    Descent, INF, NAN, after_backward, after_unscaled, loss, model, ones, scaler, with_scale,
};
use testkit::{assert_refused, for_each_device, to_f64};

#[test]
fn clipping_by_tch_after_unscaling_is_allowed() {
    let (_vs, w, mut opt, mut scaler) = after_unscaled(Device::Cpu, &[3.0, 0.0, 4.0]);
    opt.clip_grad_norm(2.5);
    let clipped = to_f64(&w.grad());
    assert!((clipped[0] - 1.5).abs() < 1e-5 && (clipped[2] - 2.0).abs() < 1e-5, "{clipped:?}");
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), clipped.iter().map(|g| f64::from(1.0 - *g as f32)).collect::<Vec<_>>());
}

#[test]
fn an_infinity_written_after_unscaling_skips_the_step() {
    for_each_device(|device| {
        for bad in [INF, NAN] {
            let (_vs, w, mut opt, mut scaler) = after_unscaled(device, &[1.0; 3]);
            let _filled = w.grad().get(1).fill_(bad);
            assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
            assert_eq!(to_f64(&w), [1.0; 3]);
            scaler.update().unwrap();
            assert_eq!(scaler.get_scale().unwrap(), 4.0);
        }
    });
}

/// Also where nothing is scaled: the later backward adds numbers that were not clipped.
#[test]
fn a_backward_between_unscale_and_step_is_refused() {
    for_each_device(|device| {
        for mut scaler in [scaler(device), GradScaler::skip_only(device).unwrap()] {
            let (_vs, w, mut opt) = model(device);
            scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
            scaler.unscale_(&mut opt).unwrap();
            scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
            let text = "changed after another loss was scaled";
            assert_refused!(scaler.step(&mut opt), Error::Gradient(Changed { .. }), text);
            assert_eq!(to_f64(&w), [1.0; 3], "9 would have been applied instead of 2");
        }
    });
}

#[test]
fn a_scaled_backward_of_another_model_between_unscale_and_step_is_fine() {
    let (_a, wa, mut opt_a) = model(Device::Cpu);
    let (_b, wb, mut opt_b) = model(Device::Cpu);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&loss(&wa, &[1.0; 3])).unwrap();
    scaler.unscale_(&mut opt_a).unwrap();
    opt_a.clip_grad_value(0.5);
    scaler.backward(&loss(&wb, &[1.0; 3])).unwrap();
    assert!(scaler.step(&mut opt_a).unwrap().is_stepped().unwrap());
    assert!(scaler.step(&mut opt_b).unwrap().is_stepped().unwrap());
    scaler.update().unwrap();
    assert_eq!((to_f64(&wa), to_f64(&wb)), (vec![0.5; 3], vec![0.0; 3]));
}

#[test]
fn a_gradient_that_appears_between_unscale_and_step_is_refused() {
    let (w, late) = (ones(Kind::Float, Device::Cpu), ones(Kind::Float, Device::Cpu));
    let mut opt = Descent::of([&w, &late]);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    scaler.unscale_(&mut opt).unwrap();
    scaler.backward(&loss(&late, &[1.0; 3])).unwrap();
    let error = scaler.step(&mut opt).unwrap_err().to_string();
    assert!(error.contains("parameter 1 [3]") && error.contains("appeared"), "{error}");
    assert_eq!(to_f64(&late), [1.0; 3]);
}

#[test]
fn the_transaction_clips_to_the_norm_and_returns_the_norm_before() {
    for_each_device(|device| {
        let (_vs, w, mut opt, mut scaler) = after_backward(device, &[3.0, 0.0, 4.0]);
        let mut unscaled = scaler.unscale(&mut opt).unwrap();
        let norm = unscaled.clip_grad_norm(2.5).unwrap();
        assert_eq!((norm.device(), to_f64(&norm)), (device, vec![5.0]));
        // In f32, like PyTorch: 1e-6 is added to the norm, and a number divided by a tensor is the number times the
        // reciprocal.
        let factor = 2.5f32 * (5.0f32 + 1e-6).recip();
        let want = [3.0f32, 0.0, 4.0].map(|g| f64::from(1.0 - g * factor));
        assert!(unscaled.step().unwrap().is_stepped().unwrap());
        assert_eq!(to_f64(&w), want);
        scaler.update().unwrap();
    });
}

#[test]
fn a_norm_within_the_limit_changes_no_gradient() {
    let (_vs, w, mut opt, scaler) = after_backward(Device::Cpu, &[0.1, 0.2, 0.3]);
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    let before = to_f64(&w.grad());
    let _norm = unscaled.clip_grad_norm(1.0).unwrap();
    assert_eq!(to_f64(&w.grad()), before);
}

#[test]
fn the_transaction_clips_values() {
    let (_vs, w, mut opt, scaler) = after_backward(Device::Cpu, &[-3.0, 0.25, 4.0]);
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    unscaled.clip_grad_value(0.5).unwrap();
    assert!(unscaled.step().unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), [1.5, 0.75, 0.5]);
}

#[test]
fn two_transactions_are_open_at_once() {
    let (_a, wa, mut opt_a) = model(Device::Cpu);
    let (_b, wb, mut opt_b) = model(Device::Cpu);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&(loss(&wa, &[1.0; 3]) + loss(&wb, &[NAN; 3]))).unwrap();
    let a = scaler.unscale(&mut opt_a).unwrap();
    let b = scaler.unscale(&mut opt_b).unwrap();
    assert!(b.step().unwrap().is_skipped().unwrap());
    assert!(a.step().unwrap().is_stepped().unwrap());
    scaler.update().unwrap();
    assert_eq!((to_f64(&wa), to_f64(&wb)), (vec![0.0; 3], vec![1.0; 3]));
}

#[test]
fn a_dropped_transaction_takes_no_step_but_counts_its_check() {
    let (_vs, w, mut opt, mut scaler) = after_backward(Device::Cpu, &[INF; 3]);
    drop(scaler.unscale(&mut opt).unwrap());
    assert_refused!(scaler.unscale(&mut opt), Error::Scaler(ScalerError::AlreadyUnscaled));
    scaler.update().unwrap();
    assert_eq!((to_f64(&w), scaler.get_scale().unwrap()), (vec![1.0; 3], 4.0));
}

#[test]
fn a_transaction_of_a_disabled_scaler_clips_and_steps() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let scaler = GradScaler::disabled();
    scaler.backward(&loss(&w, &[3.0, 0.0, 4.0])).unwrap();
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    unscaled.clip_grad_value(1.0).unwrap();
    assert!(unscaled.step().unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), [0.0, 1.0, 0.0]);
}

#[test]
fn clipping_without_any_gradient_returns_zero() {
    let (_vs, _w, mut opt) = model(Device::Cpu);
    let scaler = scaler(Device::Cpu);
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    let norm: Tensor = unscaled.clip_grad_norm(1.0).unwrap();
    assert_eq!(to_f64(&norm), [0.0]);
    assert!(unscaled.step().unwrap().has_no_gradients());
}

#[test]
fn an_optimizer_behind_a_pointer_takes_part_in_transactions() {
    let w = ones(Kind::Float, Device::Cpu);
    let mut boxed: Box<dyn AmpOptimizer> = Box::new(Descent::of([&w]));
    let scaler = scaler(Device::Cpu);
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    assert!(scaler.unscale(&mut *boxed).unwrap().step().unwrap().is_stepped().unwrap());
}

#[test]
fn clipping_in_a_transaction_does_not_hide_a_scaled_backward() {
    let (_vs, w, mut opt, scaler) = after_backward(Device::Cpu, &[1.0; 3]);
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    assert_refused!(unscaled.clip_grad_norm(1.0), Error::Gradient(Changed { .. }));
    assert_eq!(to_f64(&w.grad()), [9.0; 3], "clipping that is refused changes nothing");
    assert_refused!(unscaled.step(), Error::Gradient(Changed { .. }));
    assert_eq!(to_f64(&w), [1.0; 3]);
}

#[test]
fn clipping_in_a_transaction_does_not_hide_an_infinity() {
    let (_vs, w, mut opt, scaler) = after_backward(Device::Cpu, &[1.0; 3]);
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    let _filled = w.grad().get(0).fill_(INF);
    let _norm = unscaled.clip_grad_norm(1.0).unwrap();
    assert!(unscaled.step().unwrap().is_skipped().unwrap());
    assert_eq!(to_f64(&w), [1.0; 3]);
}

#[test]
fn an_invalid_limit_is_refused_and_the_gradients_are_unchanged() {
    let (_vs, w, mut opt, scaler) = after_backward(Device::Cpu, &[1.0; 3]);
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    for limit in [-1.0, NAN] {
        assert_refused!(unscaled.clip_grad_norm(limit), Error::InvalidArgument { .. });
        assert_refused!(unscaled.clip_grad_value(limit), Error::InvalidArgument { .. });
    }
    assert_eq!(to_f64(&w.grad()), [1.0; 3]);
}

#[test]
fn clipping_to_an_infinite_norm_cannot_write_nan() {
    for_each_device(|device| {
        let (_vs, w, mut opt, scaler) = after_backward(device, &[1e30; 3]);
        let mut unscaled = scaler.unscale(&mut opt).unwrap();
        let norm = to_f64(&unscaled.clip_grad_norm(INF).unwrap())[0];
        // On the CPU the squares are summed in f64, which can hold them.
        let want = if device == Device::Cpu { f64::from(3f32.sqrt() * 1e30) } else { INF };
        assert!((norm / want - 1.0).abs() < 1e-6 || norm == want, "{norm} {want}");
        assert_eq!(unscaled.step().unwrap().is_skipped().unwrap(), norm == INF);
        assert!(to_f64(&w).iter().all(|w| w.is_finite()));
    });
}

/// The norm of these gradients is infinite even in f64, so the factor is infinity divided by infinity.
#[test]
fn a_step_is_skipped_if_clipping_to_an_infinite_norm_would_write_nan() {
    for_each_device(|device| {
        for in_transaction in [true, false] {
            let w = ones(Kind::Double, device);
            let mut opt = Descent::of([&w]);
            let mut scaler = with_scale(1.0).build(device).unwrap();
            scaler.backward(&loss(&w, &[1.7e308; 3])).unwrap();
            let outcome = if in_transaction {
                let mut unscaled = scaler.unscale(&mut opt).unwrap();
                assert_eq!(to_f64(&unscaled.clip_grad_norm(INF).unwrap()), [INF]);
                unscaled.step().unwrap()
            } else {
                scaler.step_clip_norm(&mut opt, INF).unwrap()
            };
            assert!(outcome.is_skipped().unwrap(), "in a transaction: {in_transaction}");
            assert_eq!(to_f64(&w), [1.0; 3]);
        }
    });
}

#[test]
fn a_gradient_that_appears_in_a_transaction_is_not_clipped_while_it_is_scaled() {
    let (_vs, w, mut opt) = model(Device::Cpu);
    let scaler = scaler(Device::Cpu);
    let mut unscaled = scaler.unscale(&mut opt).unwrap();
    scaler.backward(&loss(&w, &[1.0; 3])).unwrap();
    assert_refused!(unscaled.clip_grad_value(1.0), Error::Gradient(Changed { .. }));
    assert!(unscaled.step().unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&w), [0.0; 3]);
}

#[test]
fn a_scaler_can_be_sent_to_another_thread() {
    let scaler = scaler(Device::Cpu);
    let scale = std::thread::spawn(move || scaler.get_scale());
    assert_eq!(scale.join().unwrap().unwrap(), 8.0);
}

/// Like PyTorch: an overflow that was found counts, whatever the gradient is afterwards.
#[test]
fn an_infinity_that_is_overwritten_after_unscaling_still_skips_the_step() {
    for_each_device(|device| {
        let (_vs, w, mut opt, mut scaler) = after_unscaled(device, &[1.0, INF, 1.0]);
        let _filled = w.grad().fill_(1.0);
        assert!(scaler.step(&mut opt).unwrap().is_skipped().unwrap());
        scaler.update().unwrap();
        assert_eq!((to_f64(&w), scaler.get_scale().unwrap()), (vec![1.0; 3], 4.0));
    });
}
