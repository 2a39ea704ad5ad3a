//! The buffers of a model when steps are skipped.

use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::buffers::{BufferSnapshot, check_buffers_finite};
use tch_amp::checkpoint::CheckpointError;
use tch_amp::{Error, GradScaler};
use testkit::tensors::{Tie, tie};
use testkit::{for_each_device, to_f64};

fn batch_norm(device: Device) -> (VarStore, nn::BatchNorm) {
    let vs = VarStore::new(device);
    let norm = nn::batch_norm1d(vs.root() / "norm", 2, Default::default());
    (vs, norm)
}

fn statistics(vs: &VarStore) -> Vec<f64> {
    let all = vs.variables();
    ["norm.running_mean", "norm.running_var"].iter().flat_map(|name| to_f64(&all[*name])).collect()
}

#[test]
fn the_statistics_can_be_restored_after_a_skipped_step() {
    for_each_device(|device| {
        let (vs, norm) = batch_norm(device);
        let mut opt = nn::Sgd::default().build(&vs, 0.1).unwrap();
        let mut scaler = GradScaler::new(device).unwrap();
        let mut buffers = BufferSnapshot::new(&vs).unwrap();
        for (value, skips) in [(1.0, false), (f64::INFINITY, true), (2.0, false)] {
            let before = statistics(&vs);
            buffers.save().unwrap();
            opt.zero_grad();
            let xs = Tensor::randn([4, 2], (Kind::Float, device)) * value;
            scaler.backward(&norm.forward_t(&xs, true).square().sum(None)).unwrap();
            let skipped = scaler.step(&mut opt).unwrap().is_skipped().unwrap();
            assert_eq!(skipped, skips);
            if skipped {
                assert!(statistics(&vs).iter().any(|value| !value.is_finite()));
                buffers.restore().unwrap();
                assert_eq!(statistics(&vs), before);
            } else {
                assert_ne!(statistics(&vs), before);
            }
            scaler.update().unwrap();
        }
    });
}

#[test]
fn restoring_leaves_trained_variables_unchanged() {
    let (vs, _norm) = batch_norm(Device::Cpu);
    let mut buffers = BufferSnapshot::new(&vs).unwrap();
    let mut weight = vs.variables().remove("norm.weight").unwrap();
    tch::no_grad(|| {
        let _filled = weight.fill_(7.0);
    });
    buffers.restore().unwrap();
    assert_eq!(to_f64(&weight), [7.0; 2]);
}

#[test]
fn a_non_finite_buffer_is_named() {
    for_each_device(|device| {
        let (vs, _norm) = batch_norm(device);
        check_buffers_finite(&vs).unwrap();
        let _filled = vs.variables().remove("norm.running_var").unwrap().get(1).fill_(f64::NAN);
        match check_buffers_finite(&vs) {
            Err(Error::Checkpoint(CheckpointError::NonFiniteBuffer { name })) => {
                assert_eq!(name, "norm.running_var")
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_buffer_with_two_names_has_the_first() {
    for _ in 0..8 {
        let vs = VarStore::new(Device::Cpu);
        let mut mean = vs.root().zeros_no_train("running_mean", &[2]);
        tie(&vs, Tie::Insert, "another", &mean);
        let mut buffers = BufferSnapshot::new(&vs).unwrap();
        drop(mean.fill_(f64::NAN));
        let error = check_buffers_finite(&vs).unwrap_err();
        assert!(
            matches!(&error, Error::Checkpoint(CheckpointError::NonFiniteBuffer { name }) if name == "another"),
            "{error}"
        );
        buffers.restore().unwrap();
        assert_eq!(to_f64(&mean), [0.0; 2]);
    }
}
