//! One batch on several devices: here the CPU, several times. tests/devices has it on GPUs.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Device, Kind, Tensor};
use tch_amp::distributed::data_parallel;
use tch_amp::{Autocast, Error};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn leaf(shape: &[i64]) -> Tensor {
    let numbers = Tensor::arange(shape.iter().product::<i64>(), FLOAT).view(shape);
    (numbers / 8.0).set_requires_grad(true)
}

fn product(parameters: &[Tensor], xs: &Tensor) -> Tensor {
    xs.linear(&parameters[0], None::<&Tensor>)
}

#[test]
fn the_parts_and_their_gradients_are_those_of_the_whole_batch() {
    for rows in [1, 2, 5, 7] {
        for devices in 1..4 {
            // Small numbers, which are added exactly in any order.
            let run = |forward: &dyn Fn(&[Tensor], &Tensor) -> Tensor| {
                let (weight, xs) = (leaf(&[3, 4]), leaf(&[rows, 4]));
                let ys = forward(&[weight.shallow_clone()], &xs);
                ys.square().sum(Kind::Float).backward();
                (ys.detach(), weight.grad(), xs.grad())
            };
            let devices = vec![Device::Cpu; devices];
            let divided =
                run(&|parameters, xs| data_parallel(&devices, parameters, xs, product).unwrap());
            assert_eq!(divided, run(&product), "{rows} rows on {} devices", devices.len());
        }
    }
}

#[test]
fn threads_have_the_autocast_state_and_the_grad_mode_of_the_caller() {
    let (weight, xs) = (leaf(&[3, 4]), Tensor::ones([4, 4], FLOAT));
    let run = || data_parallel(&[Device::Cpu; 2], &[weight.shallow_clone()], &xs, product).unwrap();
    assert!(run().requires_grad() && run().kind() == Kind::Float);
    let half = Autocast::new(Device::Cpu).dtype(Kind::Half).run(run).unwrap();
    assert_eq!(half.kind(), Kind::Half);
    let records =
        |parameters: &[Tensor], xs: &Tensor| Tensor::from(product(parameters, xs).requires_grad());
    let parts =
        || data_parallel(&[Device::Cpu; 2], &[weight.shallow_clone()], &xs, records).unwrap();
    assert_eq!(parts(), Tensor::from_slice(&[true, true]));
    assert_eq!(tch::no_grad(parts), Tensor::from_slice(&[false, false]));
}

#[test]
fn losses_become_a_vector_and_panics_go_on() {
    let xs = Tensor::arange(8, FLOAT).view([4, 2]);
    let sum = |_: &[Tensor], xs: &Tensor| xs.sum(Kind::Float);
    let losses = data_parallel(&[Device::Cpu; 2], &[], &xs, sum).unwrap();
    assert_eq!(losses, Tensor::from_slice(&[6f32, 22.0]));
    let panics = |_: &[Tensor], _: &Tensor| -> Tensor { panic!("of the second part") };
    let caught =
        catch_unwind(AssertUnwindSafe(|| data_parallel(&[Device::Cpu; 2], &[], &xs, panics)));
    assert_eq!(*caught.unwrap_err().downcast::<&str>().unwrap(), "of the second part");
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let xs = Tensor::ones([2], FLOAT);
    for (devices, xs) in [
        (&[][..], &xs),
        (&[Device::Cpu][..], &Tensor::from(1f32)),
        (&[Device::Cpu][..], &Tensor::ones([0, 3], FLOAT)),
    ] {
        let refused = data_parallel(devices, &[], xs, |_, xs| xs.shallow_clone());
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
}
