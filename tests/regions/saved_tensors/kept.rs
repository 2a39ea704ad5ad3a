//! What is kept, how often, and what stays as it is.

use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::autocast;
use tch_amp::memory::{DeviceMemory, SavedTensors};

use testkit::bits::bits;
use testkit::{assert_says, for_each_device};

use super::{activation, alive, forms, random, taken};

const SIZE: [i64; 2] = [256, 256];
const NUMBERS: u64 = 256 * 256;

/// What each form takes for a number of an activation in f32; the factors of 256 rows are above it.
fn bytes(name: &str) -> u64 {
    match name {
        "half" => 2 * NUMBERS,
        "fp8_rows" => NUMBERS + 256 * 4,
        _ => 4 * NUMBERS,
    }
}

#[test]
fn an_activation_takes_as_many_bytes_as_its_form() {
    for (name, form) in forms() {
        let (leaf, _) = activation(Device::Cpu, Kind::Float, SIZE);
        let one = Tensor::ones([256], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        // The product and its sines are freed, apart from what the sines and cosines save.
        let (loss, kept) =
            alive(|| form.run(|| (&leaf * &one).sin().cos().sum(Kind::Float)).unwrap());
        let about = 2 * bytes(name);
        assert!((about..about + 2048).contains(&kept), "{name}: {kept} bytes, not {about}");
        drop(loss);
    }
}

#[test]
fn what_several_nodes_save_is_kept_once() {
    for (name, form) in forms() {
        let (_leaf, x) = activation(Device::Cpu, Kind::Float, SIZE);
        let (losses, kept) = alive(|| {
            let save = || [x.sin(), x.cos(), x.tr().sin(), x.view([128, 512]).exp2().cos()];
            form.run(|| save().map(|y| y.sum(Kind::Float))).unwrap()
        });
        // The last has an activation of its own, which is saved as a result and as an argument.
        let about = if name == "on_host" { bytes(name) } else { 2 * bytes(name) };
        assert!((about - 1024..about + 4096).contains(&kept), "{name}: {kept} bytes, not {about}");
        // Another thread, and another region, find it, too.
        let y = x.shallow_clone();
        let more = std::thread::spawn(move || {
            let (loss, kept) = alive(|| form.run(|| y.cos().sum(Kind::Float)).unwrap());
            drop(loss);
            kept
        });
        let more = more.join().unwrap();
        assert!(more < 2048, "{name}: {more} bytes more");
        drop(losses);
        // Once the graph is gone, it is kept again.
        let (_loss, kept) = alive(|| form.run(|| x.cos().sum(Kind::Float)).unwrap());
        let about = if name == "on_host" { 0 } else { bytes(name) };
        assert!((about..about + 2048).contains(&kept), "{name}: {kept} bytes again, not {about}");
    }
}

/// The bits of gradients with and without a form.
fn assert_stays(loss: impl Fn() -> Tensor, leaves: &[&Tensor], what: &str) {
    let gradients = || leaves.iter().map(|leaf| bits(&taken(leaf))).collect::<Vec<_>>();
    loss().backward();
    let want = gradients();
    for (name, form) in forms() {
        let (loss, kept) = alive(|| form.run(&loss).unwrap());
        loss.backward();
        assert_eq!(gradients(), want, "{name}: {what}");
        println!("{name}: {what} keeps {kept} bytes");
    }
}

#[test]
fn leaves_weights_and_their_copies_stay() {
    for_each_device(|device| {
        let x = random(device, Kind::Float, SIZE);
        let w = random(device, Kind::Float, [256, 256]).set_requires_grad(true);
        let sum = |y: Tensor| y.sum(Kind::Float);
        assert_stays(|| sum((&w * &w).detach() * w.square()), &[&w], "leaves");
        assert_stays(|| sum(x.matmul(&w)), &[&w], "a product with a weight");
        assert_stays(|| sum(x.linear(&w, None::<Tensor>)), &[&w], "a linear layer");
        let input = x.copy().set_requires_grad(true);
        assert_stays(|| sum(input.linear(&w, None::<Tensor>)), &[&w, &input], "both leaves");
        let in_region = || autocast(device, || input.linear(&w, None::<Tensor>)).unwrap();
        assert_stays(|| sum(in_region()), &[&w, &input], "the copy that autocast caches");
        let views = || {
            w.view([128, 512])
                .to_kind(Kind::BFloat16)
                .tr()
                .contiguous()
                .matmul(&x.view([128, 512]).to_kind(Kind::BFloat16))
        };
        assert_stays(|| sum(views()), &[&w], "views and casts of a weight");
    });
}

#[test]
fn integers_small_tensors_expanded_ones_and_f64_stay() {
    let device = Device::Cpu;
    let (leaf, x) = activation(device, Kind::Float, [64, 63]);
    let again = || &leaf * &leaf;
    assert_stays(|| again().sin().sum(Kind::Float), &[&leaf], "fewer than 4096 numbers");
    let _unused = x;
    let leaf = random(device, Kind::Double, SIZE).set_requires_grad(true);
    assert_stays(|| (&leaf * &leaf).sin().sum(Kind::Double), &[&leaf], "f64");
    let leaf = random(device, Kind::Float, [256, 16]).set_requires_grad(true);
    let targets = Tensor::arange(4096, (Kind::Int64, device)).remainder(16);
    let loss = || {
        // The rows are saved as indices, and the expanded row as it is.
        let row = (&leaf * 2).narrow(0, 0, 1).expand([4096, 16], false);
        let wide = leaf.index_select(0, &(&targets * 3)).view([4096, 16]) + row.sin();
        wide.cross_entropy_loss(&targets, None::<Tensor>, Reduction::Mean, -100, 0.0)
    };
    let want = {
        loss().backward();
        taken(&leaf)
    };
    SavedTensors::on_host().run(loss).unwrap().backward();
    assert_eq!(bits(&taken(&leaf)), bits(&want));
    let row = leaf.view([1, 4096]) * 2;
    let expanded = row.expand([64, 4096], false);
    let ((), kept) = alive(|| drop(SavedTensors::half().run(|| expanded.sin()).unwrap()));
    assert!(kept < 2048, "{kept} bytes");
}

/// As it is, a small part of an activation would keep the memory of all of it.
#[test]
fn a_small_part_is_kept_without_the_rest() {
    for_each_device(|device| {
        let leaf = random(device, Kind::Float, SIZE).set_requires_grad(true);
        let one = Tensor::ones([256], (Kind::Float, device)).set_requires_grad(true);
        let loss = || {
            let x = &leaf * &one;
            x.select(1, 3).sin().sum(Kind::Float) + x.narrow(0, 0, 2).cos().sum(Kind::Float)
        };
        loss().backward();
        let want = bits(&taken(&leaf));
        let allocated = || DeviceMemory::read(device).map_or(0, |memory| memory.allocated);
        for (name, form) in forms() {
            let before = allocated();
            let (loss, kept) = alive(|| form.run(loss).unwrap());
            let kept = kept + allocated() - before;
            let most = if name == "on_host" && device == Device::Cpu { 4 * NUMBERS } else { 0 };
            assert!(kept <= most + 8192, "{name} on {device:?}: {kept} bytes");
            loss.backward();
            assert_eq!(bits(&taken(&leaf)), want, "{name} on {device:?}");
        }
    });
}

/// A tensor that is given other data is kept anew, though autograd counts no change.
#[test]
fn other_data_are_kept_anew() {
    for (name, form) in forms() {
        let (leaf, mut x) = activation(Device::Cpu, Kind::Float, SIZE);
        let before = x.detach().copy();
        let [old, new] = form
            .run(|| {
                let old = x.sin().sum(Kind::Float);
                x.set_data(&(&before + 1.0));
                [old, x.sin().sum(Kind::Float)]
            })
            .unwrap();
        for (loss, numbers) in [(new, &before + 1.0), (old, before)] {
            let got = Tensor::run_backward(&[loss], &[&leaf], true, false);
            let error = (&got[0] - numbers.cos()).abs().max().double_value(&[]);
            let bound = if name == "fp8_rows" { 0.4 } else { 0.02 };
            assert!(error < bound, "{name}: {error}");
        }
    }
}

#[test]
fn a_change_in_place_of_what_was_saved_is_refused() {
    for_each_device(|device| {
        let change = |saved: &dyn Fn(&Tensor) -> Tensor, what: &str| {
            let (_leaf, x) = activation(device, Kind::Float, SIZE);
            let y = saved(&x);
            let _changed = x.shallow_clone().g_add_scalar_(1);
            let failed = y.sum(Kind::Float).f_backward();
            assert_says(failed, "has been modified by an inplace operation");
            println!("{what}");
        };
        change(&|x| x.sin(), "without hooks");
        for (name, form) in forms() {
            change(&|x| form.run(|| x.sin()).unwrap(), name);
            // What stays as it is is looked at, too.
            change(&|x| form.run(|| x.narrow(0, 0, 2).sin()).unwrap(), name);
        }
    });
}

/// A second node that saves a tensor after a change saves its new numbers.
#[test]
fn a_change_in_place_before_the_save_counts() {
    for (name, form) in forms() {
        let (leaf, x) = activation(Device::Cpu, Kind::Float, SIZE);
        form.run(|| {
            let old = x.sin();
            let _changed = x.shallow_clone().g_add_scalar_(1);
            x.sin().sum(Kind::Float).backward();
            assert!(old.sum(Kind::Float).f_backward().is_err(), "{name}");
        })
        .unwrap();
        let (want, got) = ((leaf.detach() + 1).cos(), leaf.grad());
        let error = (got - want).abs().max().double_value(&[]);
        let bound = if name == "fp8_rows" { 0.4 } else { 0.02 };
        assert!(error < bound, "{name}: {error}");
    }
}

/// A derivative takes the exponential of these results, which are kept with every bit.
#[test]
fn logarithms_of_probabilities_are_kept_as_they_are() {
    for (name, form) in forms() {
        let gradient = |keep: bool| {
            let (leaf, x) = activation(Device::Cpu, Kind::Float, [128, 64]);
            let loss =
                || (x.sin() * 30.0).log_softmax(-1, Kind::Float).select(1, 3).sum(Kind::Float);
            let loss = if keep { form.run(loss).unwrap() } else { loss() };
            loss.backward();
            taken(&leaf)
        };
        let (kept, plain) = (gradient(true), gradient(false));
        // The argument of the sine alone has lost bits.
        let apart = (kept - &plain).norm() / plain.norm();
        assert!(apart.double_value(&[]) < 0.05, "{name}: {apart}");
    }
    let gradient = |form: SavedTensors| {
        let (leaf, x) = activation(Device::Cpu, Kind::Float, [128, 64]);
        let inputs = SavedTensors::unchanged().run(|| x.sin() * 30.0).unwrap();
        form.run(|| inputs.log_softmax(-1, Kind::Float).select(1, 3))
            .unwrap()
            .sum(Kind::Float)
            .backward();
        bits(&taken(&leaf))
    };
    assert_eq!(gradient(SavedTensors::fp8_rows()), gradient(SavedTensors::unchanged()));
}

/// The statistics of a group norm are outputs of its node beside the result.
#[test]
fn statistics_of_norms_are_kept_as_they_are() {
    let gradient = |form: SavedTensors| {
        let one = || Tensor::ones([64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let (weight, bias) = (one(), one());
        let x = random(Device::Cpu, Kind::Float, [128, 64 * 4]).view([128, 64, 4]);
        let ys = form.run(|| x.group_norm(32, Some(&weight), Some(&bias), 1e-5, false)).unwrap();
        ys.square().sum(Kind::Float).backward();
        bits(&weight.grad())
    };
    assert_eq!(gradient(SavedTensors::fp8_rows()), gradient(SavedTensors::unchanged()));
}

/// Parts of a weight are weights.
#[test]
fn weights_in_parts_are_kept_as_they_are() {
    let gradient = |form: SavedTensors| {
        let weight = random(Device::Cpu, Kind::Float, [192, 64]).set_requires_grad(true);
        let (leaf, x) = activation(Device::Cpu, Kind::Float, [16, 64]);
        let parts = weight.chunk(3, 0);
        let ys = form.run(|| x.linear(&parts[1], None::<&Tensor>)).unwrap();
        ys.square().sum(Kind::Float).backward();
        bits(&taken(&leaf))
    };
    assert_eq!(gradient(SavedTensors::fp8_rows()), gradient(SavedTensors::unchanged()));
}

/// The derivative of a maximum compares its argument with its result.
#[test]
fn a_part_of_a_region_can_be_kept_as_it_is() {
    let (leaf, x) = activation(Device::Cpu, Kind::Float, [128, 64]);
    let largest = || SavedTensors::unchanged().run(|| x.amax([-1], false)).unwrap();
    SavedTensors::half().run(largest).unwrap().sum(Kind::Float).backward();
    let grad = taken(&leaf);
    assert_eq!(grad.sum(Kind::Float).double_value(&[]), 128.0);
}
