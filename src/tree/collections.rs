//! Lists, options and maps of trees.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::hash::{BuildHasher, Hash};

use tch::Tensor;

use crate::error::{Error, Result};
use crate::tree::{Tree, at, mismatch};

impl<T: Tree> Tree for [T] {
    type Output = Vec<T::Output>;

    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self::Output> {
        self.iter().map(|tree| tree.try_map(f)).collect()
    }

    fn try_zip(
        &self,
        other: &Self,
        f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Self::Output> {
        if self.len() != other.len() {
            return Err(lengths(self.len(), other.len()));
        }
        let pairs = self.iter().zip(other).enumerate();
        pairs.map(|(index, (a, b))| at(a.try_zip(b, f), || format!("[{index}]"))).collect()
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.iter().for_each(|tree| tree.visit(f));
    }
}

fn lengths(a: usize, b: usize) -> Error {
    mismatch(format!("{a} elements in the first and {b} in the second"))
}

impl<T: Tree> Tree for Vec<T> {
    type Output = Vec<T::Output>;

    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self::Output> {
        self.as_slice().try_map(f)
    }

    fn try_zip(
        &self,
        other: &Self,
        f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Self::Output> {
        self.as_slice().try_zip(other, f)
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.as_slice().visit(f);
    }
}

impl<T: Tree, const N: usize> Tree for [T; N] {
    type Output = [T::Output; N];

    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self::Output> {
        array(self.as_slice().try_map(f)?)
    }

    fn try_zip(
        &self,
        other: &Self,
        f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Self::Output> {
        array(self.as_slice().try_zip(other, f)?)
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.as_slice().visit(f);
    }
}

fn array<T, const N: usize>(list: Vec<T>) -> Result<[T; N]> {
    list.try_into().map_err(|list: Vec<T>| lengths(N, list.len()))
}

impl<T: Tree> Tree for Option<T> {
    type Output = Option<T::Output>;

    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self::Output> {
        self.as_ref().map(|tree| tree.try_map(f)).transpose()
    }

    fn try_zip(
        &self,
        other: &Self,
        f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Self::Output> {
        match (self, other) {
            (Some(a), Some(b)) => a.try_zip(b, f).map(Some),
            (None, None) => Ok(None),
            (Some(_), None) => Err(mismatch("Some in the first and None in the second".into())),
            (None, Some(_)) => Err(mismatch("None in the first and Some in the second".into())),
        }
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.iter().for_each(|tree| tree.visit(f));
    }
}

macro_rules! map {
    ($map:ident<K, T $(, $hasher:ident)?>, $($key:path),+) => {
        impl<K: Clone + Debug $(+ $key)+, T: Tree $(, $hasher: BuildHasher + Default)?> Tree
            for $map<K, T $(, $hasher)?>
        {
            type Output = $map<K, T::Output $(, $hasher)?>;

            fn try_map(
                &self,
                f: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
            ) -> Result<Self::Output> {
                self.iter().map(|(key, tree)| Ok((key.clone(), tree.try_map(f)?))).collect()
            }

            fn try_zip(
                &self,
                other: &Self,
                f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
            ) -> Result<Self::Output> {
                if let Some(key) = other.keys().find(|key| !self.contains_key(key)) {
                    return Err(mismatch(format!("{key:?} is in the second only")));
                }
                let zip = |(key, a): (&K, &T)| {
                    let only = || mismatch(format!("{key:?} is in the first only"));
                    let b = other.get(key).ok_or_else(only)?;
                    Ok((key.clone(), at(a.try_zip(b, f), || format!("[{key:?}]"))?))
                };
                self.iter().map(zip).collect()
            }

            fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
                self.values().for_each(|tree| tree.visit(f));
            }
        }
    };
}

map!(BTreeMap<K, T>, Ord);
map!(HashMap<K, T, S>, Eq, Hash);
