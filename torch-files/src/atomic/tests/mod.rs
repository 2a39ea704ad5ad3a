//! How a file is replaced: on a simulated disk that fails or loses power, on a real one, and by processes that are
//! killed.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod faults;
mod files;
mod kills;
mod log;
mod loss;
mod memory;
mod power;
#[cfg(unix)]
mod strace;
#[cfg(unix)]
mod traced;
#[cfg(unix)]
mod unix;

use std::io::{self, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::atomic::place::Place;
use crate::atomic::{Replaced, Target};
use crate::error::Result;

/// A folder that is removed when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        static COUNTER: AtomicUsize = AtomicUsize::new(0);
        let (process, count) = (std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(format!("tch-amp-{process}-{count}-{name}"));
        drop(std::fs::remove_dir_all(&folder));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The sorted names of its entries.
    fn names(&self) -> Vec<String> {
        let names = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// Writes pieces in the order of a checkpoint: the start is rewritten at the end, when the offsets are known.
fn fill_with(content: &[u8], piece: usize) -> impl FnMut(&mut dyn Target) -> io::Result<()> {
    move |target| {
        target.write_all(&vec![0; 8.min(content.len())])?;
        for piece in content.get(8..).unwrap_or_default().chunks(piece) {
            target.write_all(piece)?;
        }
        target.seek(SeekFrom::Start(0))?;
        target.write_all(&content[..8.min(content.len())])?;
        target.flush()
    }
}

/// Bytes that differ from place to place and from version to version: every word is nonzero and unique.
fn content(version: u64, length: usize) -> Vec<u8> {
    let words = (1..).flat_map(|place: u64| (((version + 1) << 32) | place).to_be_bytes());
    words.take(length).collect()
}

/// The place of a file, without the permissions of an existing one.
fn place(path: &Path) -> Place {
    let folder = path.parent().unwrap().to_owned();
    Place { path: path.to_owned(), folder, permissions: None }
}

/// Asserts that a file was replaced for good.
fn replaced(outcome: Result<Replaced>) {
    assert!(matches!(outcome, Ok(Replaced::Durable)), "{outcome:?}");
}
