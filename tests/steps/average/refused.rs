//! What averages refuse, without a change.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::average::{Ema, Swa};

use super::{model, set};
use testkit::{assert_says, to_f64};

#[test]
fn options_outside_their_range_are_refused() {
    let (vs, _) = model(Kind::Float, 1);
    for decay in [1.0, -0.1, f64::NAN, f64::INFINITY] {
        let error = Ema { decay, ..Ema::default() }.build(&vs).unwrap_err();
        assert!(error.to_string().starts_with("decay is "), "{error}");
    }
    assert_says(Ema::default().build(&VarStore::new(Device::Cpu)), "no trainable");
    let mut swa = Swa::default().build(&vs).unwrap();
    for momentum in [0.0, -1.0, 1.5, f64::NAN] {
        let none: [Tensor; 0] = [];
        let error = swa.update_batch_norm(momentum, none, Ok).unwrap_err();
        assert!(error.to_string().starts_with("momentum is "), "{error}");
    }
}

#[test]
fn a_model_that_has_changed_is_refused_as_a_whole() {
    let mut vs = VarStore::new(Device::Cpu);
    let first = vs.root().zeros("a", &[2]);
    let mut second = vs.root().zeros("b", &[2]);
    let mut average = Ema { decay: 0.5, ..Ema::default() }.build(&vs).unwrap();
    average.advance().unwrap();
    set(&first, &[4.0, 4.0]);
    let own = second.data();
    second.set_data(&Tensor::ones([3], (Kind::Float, Device::Cpu)));
    let copied = average.copy_to_model().unwrap_err();
    for error in [average.advance().unwrap_err(), average.swap_in().unwrap_err(), copied] {
        assert!(error.to_string().contains("make the averages after"), "{error}");
    }
    assert_eq!(to_f64(&first), [4.0, 4.0]);
    assert_eq!(to_f64(&average.average("a").unwrap()), [0.0, 0.0]);
    assert_eq!(average.updates().unwrap(), 1);
    second.set_data(&own);
    average.advance().unwrap();
    assert_eq!(to_f64(&average.average("a").unwrap()), [2.0, 2.0]);
    // Half precision has a place in the average of f32, and f64 has none.
    vs.half();
    average.advance().unwrap();
    vs.double();
    average.advance().unwrap_err();
}
