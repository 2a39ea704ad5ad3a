//! Precision policies: which kinds parameters are kept in, a model computes in, and its outputs have.
//!
//! A [`Policy`] is three kinds. It casts [trees](crate::tree::Tree) of tensors, the variables of a
//! [`VarStore`](crate::Policy::cast_variables) and the inputs and outputs of [modules](crate::Policy::apply_to) and
//! [closures](crate::Policy::run), and it is what people write on a command line:
//! `"params=float32,compute=bfloat16,output=float32"`, `"half"`, `"O1"`. The vocabulary is that of
//! [jmp](https://github.com/google-deepmind/jmp).

mod kinds;
mod level;
mod module;
pub(crate) mod precision;
mod run;
mod text;
mod variables;

pub use crate::error::PolicyError;
pub use kinds::{cast_to_full, cast_to_half, half_dtype};
pub use level::OptLevel;
pub use module::{KeptInF32, KeptInF32T, PolicyModule, PolicyModuleT};
pub use module::{keep_in_f32, keep_in_f32_t};
pub(crate) use precision::Policy;
pub use variables::KeepF32;
