//! The memory of devices, as a program reads it.

use tch::{Device, Kind, Tensor};
use tch_amp::memory::DeviceMemory;

use testkit::simulation::Simulation;

#[test]
fn each_device_tells_what_it_uses_and_has_used_at_most() {
    let Some(simulation) = Simulation::find() else { return };
    let bytes = |count: i64| count as u64 * 4;
    let [first, second] = [0, 1].map(|i| DeviceMemory::read(Device::Cuda(i)).unwrap());
    let (one, counts) = simulation.count(|| {
        let one = Tensor::zeros([1 << 16], (Kind::Float, Device::Cuda(0)));
        drop(Tensor::zeros([1 << 18], (Kind::Float, Device::Cuda(0))));
        assert_eq!(DeviceMemory::read(Device::Cuda(1)).unwrap().allocated, second.allocated);
        one
    });
    assert_eq!(counts.host_syncs, 0);
    let now = DeviceMemory::read(Device::Cuda(0)).unwrap();
    assert_eq!(now.allocated, first.allocated + bytes(1 << 16));
    assert!(now.max_allocated >= first.allocated + bytes((1 << 16) + (1 << 18)));
    assert!(now.reserved >= now.allocated && now.max_reserved >= now.max_allocated);

    DeviceMemory::reset_peak(Device::Cuda(0)).unwrap();
    assert_eq!(DeviceMemory::read(Device::Cuda(0)).unwrap().max_allocated, now.allocated);
    drop(one);
    let after = DeviceMemory::read(Device::Cuda(0)).unwrap();
    assert_eq!((after.allocated, after.max_allocated), (first.allocated, now.allocated));
}
