//! What is refused, and that nothing has been computed then.

use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::autocast;
use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy, token_log_probs};

use super::{Operands, refusal};

#[test]
fn arguments_that_do_not_fit_are_refused_by_name() {
    let own = Operands::random(Device::Cpu, [6, 4, 10], true);
    let config = LinearCrossEntropyConfig::default();
    let with = |hidden: &Tensor, weight: &Tensor, bias: Option<&Tensor>, targets: &Tensor| {
        refusal(linear_cross_entropy(hidden, weight, bias, targets, &config))
    };
    let (h, w, b, t) = (&own.hidden, &own.weight, own.bias.as_ref(), &own.targets);
    for (said, start) in [
        (
            with(&h.to_kind(Kind::Int64), w, b, t),
            "hidden must be a floating-point tensor, not Int64",
        ),
        (with(&h.sum(Kind::Float), w, b, t), "hidden must have a last dimension"),
        (with(h, &w.tr(), b, t), "weight must have the shape [outputs, 4]"),
        (with(h, w, Some(&w.select(1, 0).narrow(0, 0, 3)), t), "bias must have the shape [10]"),
        (with(h, w, b, &t.to_kind(Kind::Int)), "targets must be of Kind::Int64"),
        (with(h, w, b, &t.narrow(0, 0, 3)), "targets must have the shape [6]"),
        (with(&h.to_kind(Kind::BFloat16), w, b, t), "weight is Float, and hidden BFloat16"),
        (with(&Tensor::new(), w, b, t), "hidden must be a dense tensor"),
    ] {
        assert!(said.starts_with(start), "{said}");
    }
    // In a region all but f64 is cast.
    let mixed =
        autocast(Device::Cpu, || linear_cross_entropy(&h.to_kind(Kind::Half), w, b, t, &config));
    assert!(mixed.unwrap().is_ok());
    let wide =
        autocast(Device::Cpu, || linear_cross_entropy(&h.to_kind(Kind::Double), w, b, t, &config));
    assert!(refusal(wide.unwrap()).contains("casts all but f64"));
}

#[test]
fn a_target_that_is_no_class_is_refused_by_its_place() {
    let own = Operands::random(Device::Cpu, [6, 4, 10], false);
    let config = LinearCrossEntropyConfig::default();
    for wrong in [10, -1, i64::MAX, i64::MIN, -99] {
        let targets = Tensor::from_slice(&[0, -100, 9, wrong, 3, 99]);
        let said = refusal(linear_cross_entropy(&own.hidden, &own.weight, None, &targets, &config));
        assert!(
            said.contains("classes from 0 to 9") && said.contains("number 3 of them"),
            "{said}"
        );
    }
    assert!(!own.hidden.grad().defined());
}

/// On a device the host does not look at the targets; nothing outside of a row is read.
#[test]
fn a_target_out_of_range_on_a_device_makes_the_loss_nan() {
    for device in testkit::gpus() {
        let own = Operands::random(device, [4, 4, 10], false);
        let targets = Tensor::from_slice(&[1i64, 10, 3, -5]).to_device(device);
        let own = Operands { targets, ..own };
        for reduction in [Reduction::Mean, Reduction::None] {
            let loss = own.loss(&LinearCrossEntropyConfig { reduction, ..Default::default() });
            let is_nan = Vec::<bool>::try_from(loss.isnan().view(-1)).unwrap();
            match reduction {
                Reduction::None => assert_eq!(is_nan, [false, true, false, true]),
                _ => assert_eq!(is_nan, [true]),
            }
        }
    }
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let own = Operands::random(Device::Cpu, [6, 4, 10], false);
    let with = |config: LinearCrossEntropyConfig| {
        refusal(linear_cross_entropy(&own.hidden, &own.weight, None, &own.targets, &config))
    };
    let new = LinearCrossEntropyConfig::default;
    let floats = |count| Some(Tensor::ones([count], (Kind::Float, Device::Cpu)));
    for (config, start) in [
        (LinearCrossEntropyConfig { reduction: Reduction::Other(7), ..new() }, "reduction must be"),
        (
            LinearCrossEntropyConfig { label_smoothing: 1.5, ..new() },
            "label_smoothing must be from",
        ),
        (
            LinearCrossEntropyConfig { label_smoothing: f64::NAN, ..new() },
            "label_smoothing must be",
        ),
        (LinearCrossEntropyConfig { z_loss: -1.0, ..new() }, "z_loss must be finite"),
        (LinearCrossEntropyConfig { soft_cap: Some(0.0), ..new() }, "soft_cap must be positive"),
        (LinearCrossEntropyConfig { max_bytes: Some(0), ..new() }, "max_bytes must be at least 1"),
        (LinearCrossEntropyConfig { class_weights: floats(9), ..new() }, "class_weights must have"),
    ] {
        let said = with(config);
        assert!(said.starts_with(start), "{said}");
    }
    for config in [
        LinearCrossEntropyConfig { label_smoothing: 0.1, ..new() },
        LinearCrossEntropyConfig { z_loss: 0.1, ..new() },
        LinearCrossEntropyConfig { class_weights: floats(10), ..new() },
    ] {
        let said = refusal(token_log_probs(&own.hidden, &own.weight, None, &own.targets, &config));
        assert!(said.contains("is an option of a loss"), "{said}");
    }
}
