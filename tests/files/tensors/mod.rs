//! Every public function that takes tensors, called with every kind of tensor that tch can create: it returns a result
//! or a typed error, it does not panic, and an error leaves all other tensors unchanged.

mod collectives;
mod functions;
mod insight;
mod kinds;
mod optimizers;
mod training;
mod values;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Device, Kind, Tensor};

use kinds::KINDS;

/// Calls `function` with each kind of tensor, and returns the names of the kinds that it accepted.
fn with_each_kind(
    what: &str,
    function: impl Fn(Tensor) -> tch_amp::Result<()>,
) -> Vec<&'static str> {
    let (mut taken, mut wrong) = (Vec::new(), Vec::new());
    for kind in KINDS {
        let Some(tensor) = kind.make() else {
            println!("{what}: this libtorch cannot create a tensor that is {}", kind.name);
            continue;
        };
        let called = catch_unwind(AssertUnwindSafe(|| function(tensor)));
        match called {
            Err(panic) => wrong.push(format!("{}: panic, {}", kind.name, message(&*panic))),
            Ok(Ok(())) => taken.push(kind.name),
            Ok(Err(error)) => {
                let text = error.to_string();
                // The dtype of an undefined tensor is none that tch knows.
                let is_unsaid = kind.name == "undefined" && text.contains("unknown kind");
                if text.contains("INTERNAL ASSERT") || is_unsaid {
                    wrong.push(format!("{}: {text}", kind.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{what}: {wrong:#?}");
    taken
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

/// Asserts that the kinds that every function has to accept are among those that were accepted.
fn assert_takes(what: &str, taken: &[&str], wanted: &[&str]) {
    for kind in wanted {
        assert!(taken.contains(kind), "{what} refused a tensor that is {kind}");
    }
}

/// Another parameter beside the tensor under test, which no error may change.
fn witness() -> Tensor {
    Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true)
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    let plain = tensor.detach().to_device(Device::Cpu).to_kind(Kind::Double);
    Vec::try_from(plain.contiguous().view(-1)).unwrap()
}
