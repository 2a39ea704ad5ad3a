//! TorchScript modules: the switch of TorchScript's own autocast pass, and freezing.

use tch::{CModule, Device, Kind, Tensor, no_grad};
use tch_amp::{Autocast, Error, jit};
use testkit::bits::bits;
use testkit::files::Folder;
use testkit::for_each_device;
use testkit::python::Oracle;

/// How often a module is called: TorchScript looks at the first calls, and compiles for the later ones.
const CALLS: usize = 3;

/// Two layers, traced outside of all regions.
fn traced(device: Device) -> CModule {
    let matrix = |rows: i64, columns: i64| {
        let numbers = Tensor::arange(rows * columns, (Kind::Float, Device::Cpu));
        numbers.sin().view([rows, columns]).to_device(device)
    };
    let (first, second) = (matrix(16, 8), matrix(4, 16));
    let mut forward = |xs: &[Tensor]| {
        let hidden = xs[0].linear(&first, None::<&Tensor>).tanh();
        vec![hidden.linear(&second, None::<&Tensor>)]
    };
    let inputs = [inputs(device)];
    no_grad(|| CModule::create_by_tracing("Net", "forward", &inputs, &mut forward)).unwrap()
}

fn inputs(device: Device) -> Tensor {
    Tensor::arange(24, (Kind::Float, Device::Cpu)).cos().view([3, 8]).to_device(device)
}

/// The outputs of the last call.
fn outputs(module: &CModule, inputs: &Tensor) -> Tensor {
    let call = || no_grad(|| module.forward_ts(&[inputs])).unwrap();
    for _ in 1..CALLS {
        drop(call());
    }
    call()
}

/// The switch is that of the process, so that one test has all that depends on it.
#[test]
fn without_torchscripts_own_pass_a_region_rules_in_a_module_as_elsewhere() {
    for_each_device(|device| {
        let xs = inputs(device);
        let expected = outputs(&traced(device), &xs);
        let region = Autocast::new(device).dtype(Kind::BFloat16);
        let in_f32 = region.keep_in_f32(["linear"]);
        let with_pass = |enabled: bool, region: &Autocast| {
            let before = jit::set_autocast_mode(enabled).unwrap();
            let module = traced(device);
            let result = region.run(|| outputs(&module, &xs)).unwrap();
            assert_eq!(jit::set_autocast_mode(before).unwrap(), enabled);
            result
        };
        for enabled in [true, false] {
            assert_eq!(with_pass(enabled, &region).kind(), Kind::BFloat16);
        }
        // The pass has rounded the inputs of the layers before the override sees them.
        assert_ne!(bits(&with_pass(true, &in_f32).to_kind(Kind::Float)), bits(&expected));
        assert_eq!(bits(&with_pass(false, &in_f32)), bits(&expected));
    });
}

#[test]
fn a_frozen_trace_gives_the_same_bits() {
    for_each_device(|device| {
        let (_folder, file) = Folder::with("traced.pt");
        let (module, xs) = (traced(device), inputs(device));
        module.save(&file).unwrap();
        let frozen = jit::freeze(&std::fs::read(&file).unwrap()).unwrap();
        let frozen = CModule::load_data_on_device(&mut frozen.as_slice(), device).unwrap();
        assert_eq!(bits(&outputs(&frozen, &xs)), bits(&outputs(&module, &xs)));
    });
}

#[test]
fn a_file_is_frozen_as_python_freezes_it() {
    let Some(oracle) = Oracle::find("jit.py") else { return };
    let folder = Folder::new();
    let [file, to] = ["scripted.pt", "frozen.pt"].map(|name| folder.file(name));
    let [file, to] = [&file, &to].map(|path| path.to_str().unwrap());
    oracle.run(&["write", file, "eval"], "");
    let with_parameters = CModule::load(file).unwrap();
    assert_eq!(with_parameters.named_parameters().unwrap().len(), 6);

    let frozen = jit::freeze(&std::fs::read(file).unwrap()).unwrap();
    std::fs::write(to, &frozen).unwrap();
    assert_eq!(oracle.run(&["read", file, to], "").trim(), "equal 0");
    let module = CModule::load_data(&mut frozen.as_slice()).unwrap();
    assert!(module.named_parameters().unwrap().is_empty());
}

#[test]
fn what_cannot_be_frozen_is_refused() {
    for bytes in [b"".as_slice(), b"no TorchScript file"] {
        let error = jit::freeze(bytes).unwrap_err();
        assert!(matches!(error, Error::Torch(_)), "{error}");
    }
    let Some(oracle) = Oracle::find("jit.py") else { return };
    let (_folder, path) = Folder::with("training.pt");
    oracle.run(&["write", path.to_str().unwrap(), "train"], "");
    let error = jit::freeze(&std::fs::read(&path).unwrap()).unwrap_err();
    assert!(error.to_string().contains("eval mode"), "{error}");

    // As its documentation says.
    let mut module = CModule::load(&path).unwrap();
    module.set_eval();
    module.save(&path).unwrap();
    jit::freeze(&std::fs::read(&path).unwrap()).unwrap();
}
