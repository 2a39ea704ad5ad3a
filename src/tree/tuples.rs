//! Tuples, references and boxes of trees.

use tch::Tensor;

use crate::error::Result;
use crate::tree::{Tree, at};

macro_rules! tuple {
    ($($tree:ident $index:tt)*) => {
        impl<$($tree: Tree),*> Tree for ($($tree,)*) {
            type Output = ($($tree::Output,)*);

            #[allow(unused_variables, reason = "the empty tuple has no tensors")]
            fn try_map(
                &self,
                f: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
            ) -> Result<Self::Output> {
                Ok(($(self.$index.try_map(f)?,)*))
            }

            #[allow(unused_variables, reason = "the empty tuple has no tensors")]
            fn try_zip(
                &self,
                other: &Self,
                f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
            ) -> Result<Self::Output> {
                let step = |index: &str| format!(".{index}");
                Ok(($(at(self.$index.try_zip(&other.$index, f), || step(stringify!($index)))?,)*))
            }

            #[allow(unused_variables, reason = "the empty tuple has no tensors")]
            fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
                $(self.$index.visit(f);)*
            }
        }
    };
}

tuple!();
tuple!(A 0);
tuple!(A 0 B 1);
tuple!(A 0 B 1 C 2);
tuple!(A 0 B 1 C 2 D 3);
tuple!(A 0 B 1 C 2 D 3 E 4);
tuple!(A 0 B 1 C 2 D 3 E 4 F 5);

impl<T: Tree + ?Sized> Tree for &T {
    type Output = T::Output;

    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self::Output> {
        (**self).try_map(f)
    }

    fn try_zip(
        &self,
        other: &Self,
        f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Self::Output> {
        (**self).try_zip(other, f)
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        (**self).visit(f);
    }
}

impl<T: Tree + ?Sized> Tree for Box<T> {
    type Output = Box<T::Output>;

    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self::Output> {
        (**self).try_map(f).map(Box::new)
    }

    fn try_zip(
        &self,
        other: &Self,
        f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Self::Output> {
        (**self).try_zip(other, f).map(Box::new)
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        (**self).visit(f);
    }
}
