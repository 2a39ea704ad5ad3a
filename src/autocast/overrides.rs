//! Operators for which regions override autocast's lists.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::{AutocastError, Error, Result};
use crate::ffi::{self, Refused};

/// A list of operators. Equal lists are the same, and live as long as the process: a captured state can come back to
/// them at any time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Overrides(&'static List);

#[derive(Debug, Default, PartialEq)]
struct List {
    /// The names with their namespaces, and whether they run in f32.
    operators: BTreeMap<String, bool>,
    /// The number by which libtorch's side knows the list, once a region has used it.
    number: OnceLock<u32>,
}

static LISTS: Mutex<Vec<&'static List>> = Mutex::new(Vec::new());

fn interned(operators: BTreeMap<String, bool>) -> Overrides {
    let mut lists = LISTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(list) = lists.iter().find(|list| list.operators == operators) {
        return Overrides(list);
    }
    let list: &'static List = Box::leak(Box::new(List { operators, ..List::default() }));
    lists.push(list);
    Overrides(list)
}

impl Overrides {
    /// The list with these operators in addition.
    pub(super) fn with<S: AsRef<str>>(
        list: Option<Self>,
        names: impl IntoIterator<Item = S>,
        f32: bool,
    ) -> Self {
        let mut operators = list.map(|list| list.0.operators.clone()).unwrap_or_default();
        for name in names {
            let name = name.as_ref();
            let prefix = if name.contains("::") { "" } else { "aten::" };
            operators.insert(format!("{prefix}{name}"), f32);
        }
        interned(operators)
    }

    /// The number of this list and of what it does not override of an enclosing region's.
    pub(super) fn inside(self, enclosing: u32) -> Result<u32> {
        if enclosing == 0 {
            return self.number();
        }
        let around = {
            let lists = LISTS.lock().unwrap_or_else(PoisonError::into_inner);
            lists.iter().find(|list| list.number.get() == Some(&enclosing)).copied()
        };
        let mut operators = around.map(|list| list.operators.clone()).unwrap_or_default();
        operators.extend(self.0.operators.iter().map(|(name, f32)| (name.clone(), *f32)));
        interned(operators).number()
    }

    fn number(self) -> Result<u32> {
        if let Some(number) = self.0.number.get() {
            return Ok(*number);
        }
        if self.0.operators.is_empty() {
            return Ok(0);
        }
        let name = |(name, f32): (&String, &bool)| {
            let unknown = || AutocastError::UnknownOperator { operator: name.clone() };
            Ok((CString::new(name.as_str()).map_err(|_| unknown())?, *f32))
        };
        let operators: Result<Vec<_>> = self.0.operators.iter().map(name).collect();
        let operators = operators?;
        match ffi::overrides_add(&operators)? {
            // If two threads came here at once, either number will do.
            Ok(number) => Ok(*self.0.number.get_or_init(|| number)),
            Err((index, refused)) => {
                let name = operators.get(index).map(|(name, _)| name.to_string_lossy());
                let operator = name.unwrap_or_default().into_owned();
                Err(Error::Autocast(match refused {
                    Refused::Unknown => AutocastError::UnknownOperator { operator },
                    Refused::Aliases => AutocastError::NotOverridable { operator },
                }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_without_operators_is_no_list() {
        let empty = Overrides::with::<&str>(None, [], true);
        assert_eq!(empty.inside(0).ok(), Some(0));
        let exp = Overrides::with(None, ["exp"], true);
        let number = exp.inside(0).ok();
        assert!(number.is_some_and(|number| number > 0));
        // Inside of another list, it changes nothing.
        assert_eq!(empty.inside(number.unwrap_or(0)).ok(), number);
    }
}
