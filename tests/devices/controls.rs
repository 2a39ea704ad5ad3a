//! The simulation detects the faults that it exists to detect.

use std::os::unix::process::ExitStatusExt;

use tch::{Cuda, Device, Kind, Tensor};

use testkit::programs::this_test;
use testkit::simulation::Simulation;
use testkit::tensors::leaf;
use testkit::to_f64;

const SIGSEGV: i32 = 11;

#[test]
#[ignore = "its process is killed; a_host_read_of_device_memory_is_a_fault runs it"]
fn reads_device_memory() {
    let there = Tensor::ones([3], (Kind::Float, Device::Cuda(1)));
    // SAFETY: none. The address belongs to a simulated device, and the read must terminate the process.
    println!("read {}", unsafe { *there.data_ptr().cast::<f32>() });
}

#[test]
fn a_host_read_of_device_memory_is_a_fault() {
    let Some(_simulation) = Simulation::find() else { return };
    let output = this_test("controls::reads_device_memory").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(SIGSEGV), "{said}");
    assert!(said.contains("host code touches the memory of cuda:1 at offset"), "{said}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("read 1"));
}

#[test]
#[ignore = "it needs a process without devices; without_devices_training_goes_on_with_the_cpu runs it"]
fn trains_on_what_there_is() {
    let device = Device::cuda_if_available();
    let weight = leaf(&[2.0], Kind::Float, device);
    weight.square().sum(None).backward();
    println!("on {device:?}: {:?}", to_f64(&weight.grad()));
}

#[test]
fn without_devices_training_goes_on_with_the_cpu() {
    let Some(_simulation) = Simulation::find() else { return };
    let mut program = this_test("controls::trains_on_what_there_is");
    let output = program.env("SIMULATED_CUDA_DEVICES", "0").output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(said[0].contains("on Cpu: [4.0]"), "{}", said.concat());
}

#[test]
fn a_copy_is_garbage_until_the_host_synchronizes() {
    let Some(_simulation) = Simulation::find() else { return };
    let there = Tensor::ones([3], (Kind::Float, Device::Cuda(0)));
    let here = there.to_device_(Device::Cpu, Kind::Float, true, false);
    // Without a lag, the copy is there immediately.
    let is_late = std::env::var("SIMULATED_CUDA_LAG").map_or(true, |lag| lag != "0");
    assert_eq!(to_f64(&here)[0].is_nan(), is_late);
    Cuda::synchronize(0);
    assert_eq!(to_f64(&here), [1.0; 3]);
}

#[test]
fn a_late_copy_has_the_values_from_when_it_was_launched() {
    let Some(_simulation) = Simulation::find() else { return };
    let mut there = Tensor::ones([3], (Kind::Float, Device::Cuda(0)));
    let here = there.to_device_(Device::Cpu, Kind::Float, true, false);
    drop(there.fill_(7.0));
    Cuda::synchronize(0);
    assert_eq!(to_f64(&here), [1.0; 3]);
}

#[test]
fn new_device_memory_is_not_zero() {
    let Some(_simulation) = Simulation::find() else { return };
    for _ in 0..2 {
        let fresh = Tensor::empty([300], (Kind::Float, Device::Cuda(0)));
        assert!(to_f64(&fresh).iter().all(|x| x.is_nan()));
        drop(fresh + 1.0);
    }
}

#[test]
fn an_operator_without_a_cuda_kernel_is_refused() {
    let Some(_simulation) = Simulation::find() else { return };
    let there = Tensor::ones([2, 3], (Kind::Float, Device::Cuda(0)));
    let error = there.f_to_mkldnn(None).unwrap_err().to_string();
    assert!(error.contains("Could not run 'aten::to_mkldnn'"), "{error}");
    assert!(error.contains("'CUDA' backend"), "{error}");
}

#[test]
fn operations_on_tensors_of_two_devices_are_refused() {
    let Some(_simulation) = Simulation::find() else { return };
    let [here, there] = [0, 1].map(|i| Tensor::ones([2], (Kind::Float, Device::Cuda(i))));
    let error = here.f_mul(&there).unwrap_err().to_string();
    assert!(error.contains("Expected all tensors to be on the same device"), "{error}");
    let error = here.f_mul(&Tensor::ones([2], (Kind::Float, Device::Cpu))).unwrap_err().to_string();
    assert!(error.contains("Expected all tensors to be on the same device"), "{error}");
}

#[test]
fn only_the_planted_allocation_fails() {
    let Some(simulation) = Simulation::find() else { return };
    let make = || Tensor::f_ones([2], (Kind::Float, Device::Cuda(1)));
    simulation.fail_allocation(2);
    assert!(make().is_ok());
    let error = make().unwrap_err().to_string();
    assert!(error.contains("CUDA out of memory"), "{error}");
    assert!(make().is_ok());
    assert_eq!(simulation.fail_allocation(5), 0);
    assert!(make().is_ok());
    assert_eq!(simulation.fail_allocation(0), 4);
}
