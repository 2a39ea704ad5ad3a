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
use std::time::Duration;

use tch::Tensor;
use tch_amp::distributed::{GroupConfig, ProcessGroup, Store};

use kinds::KINDS;

/// The names of the kinds of tensors that a function has accepted.
struct Taken<'a> {
    what: &'a str,
    kinds: Vec<&'static str>,
}

impl Taken<'_> {
    /// Asserts that the kinds that the function has to accept are among them.
    fn includes(&self, wanted: &[&str]) {
        let Self { what, kinds } = self;
        for kind in wanted {
            assert!(kinds.contains(kind), "{what} refused a tensor that is {kind}");
        }
    }
}

/// Calls a function with each kind of tensor.
fn with_each_kind(what: &str, function: impl Fn(Tensor) -> tch_amp::Result<()>) -> Taken<'_> {
    let (mut kinds, mut wrong) = (Vec::new(), Vec::new());
    for kind in KINDS {
        let Some(tensor) = kind.make() else {
            println!("{what}: this libtorch cannot create a tensor that is {}", kind.name);
            continue;
        };
        let called = catch_unwind(AssertUnwindSafe(|| function(tensor)));
        match called {
            Err(panic) => wrong.push(format!("{}: panic, {}", kind.name, message(&*panic))),
            Ok(Ok(())) => kinds.push(kind.name),
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
    Taken { what, kinds }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

/// A group of one rank that fails soon.
fn group() -> ProcessGroup {
    let config = GroupConfig { timeout: Duration::from_secs(20), ..Default::default() };
    config.join(&Store::in_process().unwrap(), 0, 1).unwrap()
}

/// Another parameter beside the tensor under test, which no error may change.
fn witness() -> Tensor {
    Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true)
}
