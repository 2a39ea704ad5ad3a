//! Which losses can be scaled.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::scaler::ScalerError;
use tch_amp::{Error, GradScaler, autocast};

use crate::scaler::scaler;
use testkit::{devices, for_each_device, to_f64};

#[rstest]
#[case(Kind::Float, Kind::Float)]
#[case(Kind::Double, Kind::Double)]
#[case(Kind::Half, Kind::Float)]
#[case(Kind::BFloat16, Kind::Float)]
fn a_loss_of_one_is_scaled_to_65536_in_every_shape(#[case] kind: Kind, #[case] want: Kind) {
    for_each_device(|device| {
        let scaler = GradScaler::new(device).unwrap();
        for shape in [&[][..], &[1], &[2, 2]] {
            let scaled = scaler.scale(&Tensor::ones(shape, (kind, device))).unwrap();
            assert_eq!((scaled.kind(), scaled.size()), (want, shape.to_vec()));
            assert_eq!(scaled.max().double_value(&[]), 65536.0);
        }
    });
}

/// Alone, and beside one that can be scaled.
#[rstest]
fn a_loss_that_is_not_floating_is_refused(
    #[values(Kind::Int64, Kind::Bool, Kind::ComplexFloat)] kind: Kind,
) {
    let scaler = scaler(Device::Cpu);
    let one = |kind| Tensor::ones([1], (kind, Device::Cpu));
    let pair = scaler.scale(&[one(Kind::Float), one(kind)]).map(drop);
    for refused in [scaler.scale(&one(kind)).map(drop), pair] {
        let dtype = match refused {
            Err(Error::Scaler(ScalerError::Dtype { dtype })) => dtype,
            other => panic!("{other:?}"),
        };
        assert_eq!(dtype, kind);
    }
}

#[test]
fn an_undefined_loss_is_an_error() {
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    assert!(scaler.scale(&Tensor::new()).is_err());
    assert!(scaler.backward(&Tensor::new()).is_err());
}

#[test]
fn a_loss_without_a_graph_is_an_error_in_backward() {
    let scaler = GradScaler::new(Device::Cpu).unwrap();
    let error = scaler.backward(&Tensor::from(1.0f32)).unwrap_err();
    assert!(error.to_string().contains("grad"), "{error}");
}

#[test]
fn a_low_precision_loss_keeps_its_graph() {
    for_each_device(|device| {
        let w = Tensor::ones([2, 2], (Kind::Float, device)).set_requires_grad(true);
        // The gradient passes through the dtype of the region, and the largest fp16 number is 65504.
        let scaler = scaler(device);
        let loss = autocast(device, || w.detach().mm(&w).sum(None)).unwrap();
        scaler.backward(&loss).unwrap();
        assert_eq!(to_f64(&w.grad()), [2.0 * 8.0; 4]);
    });
}

#[test]
fn losses_on_several_devices_are_scaled_on_their_devices() {
    let devices = devices();
    for home in &devices {
        let scaler = GradScaler::new(*home).unwrap();
        let ones = devices.iter().map(|device| Tensor::ones([2], (Kind::Float, *device)));
        let scaled = scaler.scale(&ones.collect::<Vec<_>>()).unwrap();
        for (scaled, device) in scaled.iter().zip(&devices) {
            assert_eq!((scaled.device(), to_f64(scaled)), (*device, vec![65536.0; 2]), "{home:?}");
        }
    }
}

#[test]
fn nested_losses_keep_their_structure() {
    for_each_device(|device| {
        let one = |kind| Tensor::ones([], (kind, device));
        let losses = (one(Kind::Float), vec![[one(Kind::Half), one(Kind::Double)]], None::<Tensor>);
        let (first, rest, none) = scaler(device).scale(&losses).unwrap();
        let [narrow, wide] = &rest[0];
        assert_eq!((narrow.kind(), wide.kind(), rest.len()), (Kind::Float, Kind::Double, 1));
        assert_eq!([&first, narrow, wide].map(to_f64), [[8.0], [8.0], [8.0]]);
        assert!(none.is_none());
    });
}

#[test]
fn a_disabled_scaler_returns_the_loss_itself() {
    let scaler = GradScaler::disabled();
    let loss = Tensor::from(3i64);
    assert_eq!(scaler.scale(&loss).unwrap().data_ptr(), loss.data_ptr());
    assert_eq!(scaler.get_scale().unwrap(), 1.0);
    assert!(!scaler.is_enabled());
}
