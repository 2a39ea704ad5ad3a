//! What is multiplied, and in which dtype.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::loss_scale::{LossScale, NoOpLossScale, StaticLossScale};

use crate::loss_scale::{all_three, of};
use testkit::rng::Rng;
use testkit::{assert_refused, for_each_device, to_f64};

/// Promotes like jmp 0.0.4, except for integers and booleans, whose products are f32 in jmp.
#[rstest]
#[case(Kind::Half, Kind::Float)]
#[case(Kind::BFloat16, Kind::Float)]
#[case(Kind::Float, Kind::Float)]
#[case(Kind::Double, Kind::Double)]
#[case(Kind::ComplexHalf, Kind::ComplexFloat)]
#[case(Kind::ComplexFloat, Kind::ComplexFloat)]
#[case(Kind::ComplexDouble, Kind::ComplexDouble)]
#[case(Kind::Int64, Kind::Int64)]
#[case(Kind::Bool, Kind::Bool)]
fn products_have_at_least_f32(#[case] kind: Kind, #[case] want: Kind) {
    for_each_device(|device| {
        let scale = StaticLossScale::new(device, 8.0).unwrap();
        for x in [of(&[1.0, 0.0], kind, device), of(&[1.0], kind, device).squeeze()] {
            let (up, down) = (scale.scale(&x).unwrap(), scale.unscale(&x).unwrap());
            assert_eq!((up.kind(), down.kind(), up.size()), (want, want, x.size()));
            let moved = kind != want || !matches!(kind, Kind::Int64 | Kind::Bool);
            let first = |x: &Tensor| to_f64(&x.to_kind(Kind::Double))[0];
            assert_eq!(first(&up), if moved { 8.0 } else { 1.0 });
            assert_eq!(first(&down), if moved { 0.125 } else { 1.0 });
        }
    });
}

#[test]
fn the_scale_does_not_overflow_a_half_precision_loss() {
    for_each_device(|device| {
        let scale = StaticLossScale::new(device, 65536.0).unwrap();
        let loss = of(&[100.0], Kind::Half, device);
        assert_eq!(to_f64(&scale.scale(&loss).unwrap()), [6_553_600.0]);
        // A small half-precision gradient is not lost either.
        let gradient = of(&[0.0078125], Kind::Half, device);
        assert_eq!(to_f64(&scale.unscale(&gradient).unwrap()), [0.0078125 / 65536.0]);
    });
}

/// Compared with plain loops: a product in f32 is the product in f64, rounded once. The reciprocal is rounded first.
#[test]
fn random_products_equal_those_of_plain_loops() {
    for_each_device(|device| {
        let mut rng = Rng::new(7);
        for _ in 0..20 {
            let factor = f64::from(1.0 + rng.below(1 << 20) as f32 / 7.0);
            let scale = StaticLossScale::new(device, factor).unwrap();
            let values: Vec<f64> =
                (0..100).map(|_| f64::from((rng.below(1 << 24) as f32 - 8e6) / 1e3)).collect();
            let x = of(&values, Kind::Float, device);
            let inverse = f64::from((1.0 / factor) as f32);
            let up: Vec<_> = values.iter().map(|x| f64::from((x * factor) as f32)).collect();
            let down: Vec<_> = values.iter().map(|x| f64::from((x * inverse) as f32)).collect();
            assert_eq!(to_f64(&scale.scale(&x).unwrap()), up);
            assert_eq!(to_f64(&scale.unscale(&x).unwrap()), down);
        }
    });
}

#[test]
fn a_no_op_loss_scale_changes_nothing() {
    let x = of(&[1.0, 2.0], Kind::Half, Device::Cpu);
    let loss_scale = NoOpLossScale;
    for y in [loss_scale.scale(&x).unwrap(), loss_scale.unscale(&x).unwrap()] {
        assert_eq!((y.kind(), y.data_ptr()), (Kind::Half, x.data_ptr()));
    }
    assert!(loss_scale.loss_scale().is_none());
    assert_eq!(loss_scale.value().unwrap(), 1.0);
}

#[test]
fn trees_are_scaled_by_each_loss_scale_behind_any_pointer() {
    for_each_device(|device| {
        for mut loss_scale in all_three(device) {
            let value = loss_scale.value().unwrap();
            let tree = (of(&[1.0], Kind::Float, device), vec![of(&[2.0], Kind::Int64, device)]);
            let check = |(x, list): (Tensor, Vec<Tensor>)| {
                assert_eq!((to_f64(&x), to_f64(&list[0])), (vec![value], vec![2.0]));
            };
            check(loss_scale.scale(&tree).unwrap());
            let borrowed: &mut dyn LossScale = &mut *loss_scale;
            check(borrowed.scale(&tree).unwrap());
            fn shared(loss_scale: &impl LossScale, x: &Tensor) -> Tensor {
                loss_scale.unscale(&loss_scale.scale(x).unwrap()).unwrap()
            }
            assert_eq!(to_f64(&shared(&loss_scale, &tree.0)), [1.0]);
            fn generic<L: LossScale>(loss_scale: L, x: &Tensor) -> Tensor {
                loss_scale.unscale(&loss_scale.scale(x).unwrap()).unwrap()
            }
            assert_eq!(to_f64(&generic(&mut loss_scale, &tree.0)), [1.0]);
            assert_eq!(to_f64(&generic(loss_scale, &tree.0)), [1.0]);
        }
    });
}

#[test]
fn undefined_gradients_stay_undefined() {
    for loss_scale in all_three(Device::Cpu) {
        assert!(!loss_scale.unscale(&[Tensor::new()]).unwrap()[0].defined());
    }
}

#[test]
fn a_tensor_on_another_device_is_scaled_on_its_device() {
    for_each_device(|device| {
        let scale = StaticLossScale::new(Device::Cpu, 8.0).unwrap();
        let y = scale.scale(&of(&[1.0], Kind::Float, device)).unwrap();
        assert_eq!((y.device(), to_f64(&y)), (device, vec![8.0]));
        let scale = StaticLossScale::new(device, 8.0).unwrap();
        let y = scale.scale(&of(&[1.0], Kind::Float, Device::Cpu)).unwrap();
        assert_eq!((y.device(), to_f64(&y)), (Device::Cpu, vec![8.0]));
    });
}

#[rstest]
#[case(0.0)]
#[case(-1.0)]
#[case(1e-39)]
#[case(1e39)]
#[case(f64::NAN)]
#[case(f64::INFINITY)]
fn impossible_scales_are_refused(#[case] scale: f64) {
    assert_refused!(
        StaticLossScale::new(Device::Cpu, scale),
        Error::InvalidArgument { name: "loss_scale", .. }
    );
}
