//! The simulation uses the CPU's kernels. Those that the CPU lacks compute the same numbers.

use tch::nn::{self, Module, RNN};
use tch::{Device, Kind, Tensor};

use testkit::bits::bits;
use testkit::simulation::Simulation;
use testkit::tensors::variables;
use testkit::to_f64;

/// Reproducible, distinct numbers between -1 and 1.
fn numbers(size: &[i64], device: Device) -> Tensor {
    let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    (places * 12.9898).sin().reshape(size).to_device(device)
}

/// The loss and the gradients of a small network with most of the operators that a training loop needs.
fn train(device: Device) -> Vec<Vec<u8>> {
    let xs = numbers(&[8, 3, 6, 6], device).to_kind(Kind::Float);
    let weights = [numbers(&[4, 3, 3, 3], device), numbers(&[5, 4], device), numbers(&[5], device)]
        .map(|w| w.to_kind(Kind::Float).set_requires_grad(true));
    let [kernel, matrix, bias] = &weights;
    let ys = xs.conv2d(kernel, None::<&Tensor>, 1, 1, 1, 1).relu().max_pool2d(2, 2, 0, 1, false);
    let ys = ys.mean_dim([2i64, 3].as_slice(), false, None).linear(matrix, Some(bias));
    let target = Tensor::arange(8, (Kind::Int64, device)).fmod(5);
    let loss = ys.layer_norm([5], None::<&Tensor>, None::<&Tensor>, 1e-5, false).gelu("none");
    let loss = loss.cross_entropy_for_logits(&target);
    loss.backward();
    let gradients = weights.iter().map(|w| bits(&w.grad().to_device(Device::Cpu)));
    std::iter::once(bits(&loss.to_device(Device::Cpu))).chain(gradients).collect()
}

#[test]
fn a_network_gives_the_bits_of_the_cpu() {
    let Some(_simulation) = Simulation::find() else { return };
    let here = train(Device::Cpu);
    for device in [Device::Cuda(0), Device::Cuda(1)] {
        assert_eq!(train(device), here, "{device:?}");
    }
}

/// The output of a recurrent layer, and the gradients of its input and its weights.
fn recur(
    device: Device,
    make: impl Fn(&nn::Path<'_>) -> Box<dyn Fn(&Tensor) -> Tensor>,
) -> Vec<f64> {
    let mut vs = nn::VarStore::new(device);
    let layer = make(&vs.root());
    vs.double();
    let mut variables = variables(&vs);
    for variable in variables.values_mut() {
        tch::no_grad(|| variable.copy_(&numbers(&variable.size(), device)));
    }
    let xs = numbers(&[2, 5, 3], device).set_requires_grad(true);
    let ys = layer(&xs);
    (&ys * numbers(&ys.size(), device)).sum(Kind::Double).backward();
    let gradients = variables.values().map(Tensor::grad);
    [ys, xs.grad()].into_iter().chain(gradients).flat_map(|t| to_f64(&t)).collect()
}

fn assert_recurs_alike(make: impl Fn(&nn::Path<'_>) -> Box<dyn Fn(&Tensor) -> Tensor>) {
    let (here, there) = (recur(Device::Cpu, &make), recur(Device::Cuda(1), &make));
    assert_eq!(here.len(), there.len());
    for (a, b) in here.iter().zip(&there) {
        // The gates are summed in another order: some hundred roundings of numbers below 10.
        assert!((a - b).abs() < 1e-12, "{a} and {b}");
    }
}

#[test]
fn an_lstm_computes_the_same_as_on_the_cpu() {
    let Some(_simulation) = Simulation::find() else { return };
    assert_recurs_alike(|path| {
        let lstm = nn::lstm(path, 3, 4, Default::default());
        Box::new(move |xs| lstm.seq(xs).0)
    });
}

#[test]
fn a_gru_computes_the_same_as_on_the_cpu() {
    let Some(_simulation) = Simulation::find() else { return };
    assert_recurs_alike(|path| {
        let gru = nn::gru(path, 3, 4, Default::default());
        Box::new(move |xs| gru.seq(xs).0)
    });
}

#[test]
fn random_numbers_are_determined_by_the_seed_of_their_device() {
    let Some(_simulation) = Simulation::find() else { return };
    let draw = |device| {
        tch::manual_seed(7);
        let layer = nn::seq().add_fn(|xs| xs.dropout(0.5, true));
        let xs = Tensor::rand([100], (Kind::Float, device));
        bits(&layer.forward(&xs).to_device(Device::Cpu))
    };
    assert_eq!(draw(Device::Cuda(0)), draw(Device::Cuda(0)));
    assert_ne!(draw(Device::Cuda(0)), draw(Device::Cpu));
}
