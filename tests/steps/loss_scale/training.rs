//! One training loop with each of the three loss scales.

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::Policy;
use tch_amp::function::{GradConfig, grad};
use tch_amp::loss_scale::{LossScale, all_finite, select_tree};
use tch_amp::policy::half_dtype;

use crate::loss_scale::{all_three, answer, of};
use testkit::{for_each_device, to_f64};

/// Fits w to minimize |xw - y|^2 by gradient descent, where the inputs of step 3 are infinite. Returns the weights.
fn train(loss_scale: &mut dyn LossScale, policy: Policy, device: Device, own: bool) -> Vec<f64> {
    let xs = of(&[1.0, 2.0, -1.0, 0.5], Kind::Float, device).reshape([2, 2]);
    let ys = of(&[3.0, 1.0], Kind::Float, device);
    let mut w = of(&[0.0, 0.0], Kind::Float, device).set_requires_grad(true);
    for step in 0..40 {
        let bad = if step == 3 { f64::INFINITY } else { 1.0 };
        let (x, v) = policy.cast_to_compute(&(&xs * bad, &w)).unwrap();
        let error = policy.cast_to_output(&x.mv(&v)).unwrap() - &ys;
        let loss = loss_scale.scale(&error.square().sum(Kind::Float)).unwrap();
        let gradients = if own {
            w.zero_grad();
            loss.backward();
            vec![w.grad()]
        } else {
            let gradients = grad(&[loss], &[&w], &GradConfig::default()).unwrap();
            gradients.into_iter().flatten().collect()
        };
        let gradients = loss_scale.unscale(&gradients).unwrap();
        let finite = all_finite(&gradients).unwrap();
        assert_eq!(answer(&finite), step != 3);
        let new = no_grad(|| &w - 0.1 * &gradients[0]);
        w = select_tree(&finite, &new, &w.detach()).unwrap().set_requires_grad(true);
        loss_scale.adjust(&finite).unwrap();
    }
    to_f64(&w)
}

#[test]
fn all_loss_scales_train_alike_with_returned_and_stored_gradients() {
    for_each_device(|device| {
        for policy in [Policy::FULL, Policy { compute: half_dtype(device), ..Policy::FULL }] {
            let want = train(&mut tch_amp::loss_scale::NoOpLossScale, policy, device, true);
            assert!(want.iter().all(|w| w.is_finite() && *w != 0.0));
            for own in [true, false] {
                for mut loss_scale in all_three(device) {
                    let dynamic = loss_scale.state_dict().unwrap();
                    // Scaling by a power of two does not round.
                    assert_eq!(train(&mut *loss_scale, policy, device, own), want);
                    let changed = loss_scale.state_dict().unwrap() != dynamic;
                    assert_eq!(
                        changed,
                        loss_scale.value().unwrap() == 4.0,
                        "one skipped step halves 8"
                    );
                }
            }
        }
    });
}

#[test]
fn a_loss_scale_can_be_sent_to_another_thread() {
    let mut loss_scale = all_three(Device::Cpu).into_iter().last().unwrap();
    let halved = std::thread::spawn(move || {
        loss_scale.adjust(&Tensor::from(false)).unwrap();
        loss_scale.value().unwrap()
    });
    assert_eq!(halved.join().unwrap(), 4.0);
}
