//! Spikes, judged on the device.

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::optim::Sgd;
use tch_amp::scaler::SpikeConfig;

use testkit::simulation::Simulation;

const GRADIENTS: [f64; 10] = [1.0, 1.2, 0.8, 1.0, 70.0, 1.1, f64::INFINITY, 1.0, 90.0, 1.0];

/// Trains with the gradients, and returns the weight and the counts.
fn train(simulation: &Simulation, device: Device) -> (f64, [u64; 2]) {
    let w = Tensor::zeros([1], (Kind::Float, device)).set_requires_grad(true);
    let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
    let mut scaler = GradScaler::new(device).unwrap();
    let mut spikes = SpikeConfig { window: 8, warmup: 4, ..Default::default() }.build().unwrap();
    let losses: Vec<_> = (0..10).map(|_| Tensor::ones([], (Kind::Float, device))).collect();
    for (i, (gradient, loss)) in GRADIENTS.iter().zip(&losses).enumerate() {
        let (_, counts) = simulation.count(|| {
            opt.zero_grad().unwrap();
            scaler.backward(&(&w * *gradient).sum(Kind::Float)).unwrap();
            spikes.watch_loss(loss);
            scaler.step_unless_spike(&mut opt, f64::INFINITY, &mut spikes).unwrap();
            scaler.update().unwrap();
        });
        // The first iteration makes the scale.
        assert!(i == 0 || counts.host_syncs == 0, "iteration {i} on {device:?} synchronizes");
    }
    let counts = spikes.counts().unwrap();
    assert_eq!(counts.loss_spikes, 0);
    (w.double_value(&[0]), [counts.norm_spikes, counts.non_finite])
}

#[test]
fn the_device_decides_as_the_host_and_without_it() {
    let Some(simulation) = Simulation::find() else { return };
    let on_device = train(&simulation, Device::Cuda(0));
    assert_eq!(on_device, train(&simulation, Device::Cpu));
    assert_eq!(on_device.1, [2, 1]);
}
