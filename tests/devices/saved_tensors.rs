//! What autograd saves on devices: the memory, launches and synchronizations of each form, copies that arrive late, and
//! allocations that fail.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::memory::SavedTensors;
use tch_amp::recompute::Recomputed;
use tch_amp::{Autocast, Error};

use testkit::bits::bits;
use testkit::simulation::{Counts, Simulation, is_model};
use testkit::tensors::variables;

const LAYERS: i64 = 6;
const ROWS: i64 = 256;
const WIDTH: i64 = 128;
/// One activation, in bytes.
const ACTIVATION: i64 = ROWS * WIDTH * 4;

struct Model {
    vs: VarStore,
    layers: nn::Sequential,
    xs: Tensor,
}

impl Model {
    fn new(device: Device) -> Self {
        Self::build(device, false)
    }

    /// With layers that are recomputed, or with plain ones.
    fn build(device: Device, recomputed: bool) -> Self {
        tch::manual_seed(7);
        let vs = VarStore::new(device);
        let mut layers = nn::seq();
        for i in 0..LAYERS {
            let linear = nn::linear(vs.root() / i, WIDTH, WIDTH, Default::default());
            let layer = nn::seq().add(linear).add_fn(|xs| xs.sin().tanh());
            layers =
                if recomputed { layers.add(Recomputed::new(layer)) } else { layers.add(layer) };
        }
        let xs = Tensor::randn([ROWS, WIDTH], (Kind::Float, device));
        Self { vs, layers, xs }
    }

    fn loss(&self, form: Option<SavedTensors>) -> Result<Tensor, Error> {
        let loss = || Ok(self.layers.forward(&self.xs).f_square()?.f_mean(Kind::Float)?);
        match form {
            Some(form) => form.try_run(loss),
            None => loss(),
        }
    }

    fn iterate(&self, form: Option<SavedTensors>) {
        self.loss(form).unwrap().backward();
    }

    fn gradients(&self, form: Option<SavedTensors>) -> Vec<Vec<u8>> {
        for w in self.vs.trainable_variables() {
            w.shallow_clone().zero_grad();
        }
        self.iterate(form);
        variables(&self.vs).values().map(|w| bits(&w.grad())).collect()
    }
}

/// What an iteration makes a device do, after one that has made the gradients.
fn counted(simulation: &Simulation, form: Option<SavedTensors>) -> Counts {
    let model = Model::new(Device::Cuda(0));
    model.iterate(form);
    simulation.count(|| model.iterate(form)).1
}

#[test]
fn the_peak_falls_by_what_is_kept_in_another_form_and_nothing_waits() {
    let Some(simulation) = Simulation::find() else { return };
    let without = counted(&simulation, None);
    // Each layer keeps its input, what the sine and what the hyperbolic tangent saves.
    let kept = 3 * LAYERS * ACTIVATION;
    for (name, form, left) in [
        ("half", SavedTensors::half(), kept / 2),
        ("fp8_rows", SavedTensors::fp8_rows(), kept / 4),
        ("on_host", SavedTensors::on_host(), 0),
    ] {
        let with = counted(&simulation, Some(form));
        println!("{name}: {with:?}, and {without:?} without");
        assert_eq!(with.host_syncs, without.host_syncs, "{name}: {with:?}");
        // Some are on their way at the peak, those of the layer that runs and those that are fetched ahead.
        let most = without.peak_bytes - kept + left + 8 * ACTIVATION;
        assert!(with.peak_bytes <= most, "{name}: {with:?}, at most {most}, {without:?} without");
    }
}

#[test]
fn what_was_on_the_host_comes_back_with_the_same_bits() {
    let Some(_simulation) = Simulation::find() else { return };
    for device in testkit::gpus() {
        let model = Model::new(device);
        let want = model.gradients(None);
        for _ in 0..3 {
            assert_eq!(model.gradients(Some(SavedTensors::on_host())), want, "{device:?}");
        }
    }
}

#[test]
fn a_region_in_half_precision_moves_what_it_saves() {
    let Some(_simulation) = Simulation::find() else { return };
    let model = Model::new(Device::Cuda(0));
    let region = Autocast::new(Device::Cuda(0)).dtype(Kind::BFloat16);
    let gradients = |form: Option<SavedTensors>| region.run(|| model.gradients(form)).unwrap();
    assert_eq!(gradients(Some(SavedTensors::on_host())), gradients(None));
}

/// The n-th allocation fails, for every n: the iteration fails, or succeeds, and the next one has the same gradients.
#[test]
fn a_failing_allocation_leaves_nothing_half_kept() {
    let Some(simulation) = Simulation::find() else { return };
    if !is_model() {
        testkit::skipped("allocations are made to fail on simulated GPUs");
        return;
    }
    let forms = [SavedTensors::half(), SavedTensors::fp8_rows(), SavedTensors::on_host()];
    for form in forms.map(Some).into_iter().chain([None]) {
        // Without a form, layers that are recomputed.
        let model = Model::build(Device::Cuda(0), form.is_none());
        let want = model.gradients(form);
        let before = tch_amp::memory::DeviceMemory::read(Device::Cuda(0)).unwrap().allocated;
        let (mut failures, mut survived) = (0, 0);
        for n in 1.. {
            let _left = simulation.fail_allocation(n);
            let run = || model.loss(form).and_then(|loss| Ok(loss.f_backward()?));
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            let left = simulation.fail_allocation(0);
            if left > 0 {
                assert!(matches!(result, Ok(Ok(()))), "{form:?}: allocation {n} was not reached");
                break;
            }
            failures += 1;
            survived += i64::from(matches!(result, Ok(Ok(()))));
            assert_eq!(model.gradients(form), want, "{form:?}: after allocation {n}");
            let now = tch_amp::memory::DeviceMemory::read(Device::Cuda(0)).unwrap().allocated;
            assert_eq!(now, before, "{form:?}: after allocation {n}");
        }
        println!("{form:?}: {failures} failures, {survived} survived");
        assert!(failures > 3 * LAYERS, "{form:?}: only {failures}");
        // What cannot be fetched ahead of time is fetched when it is asked for.
        let fetches_ahead = form == Some(SavedTensors::on_host());
        assert!(!fetches_ahead || survived > LAYERS, "{form:?}: only {survived} survived");
    }
}
