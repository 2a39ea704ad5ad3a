//! Folders for the files of a test.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use crate::programs::this_test_by;

/// An empty temporary folder, which is removed when it is dropped.
#[derive(Debug)]
pub struct Folder(pub PathBuf);

impl Folder {
    /// Creates the folder.
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let name = format!("tch-amp-checkpoint-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            match std::fs::create_dir(&path) {
                // A process with the same number was killed and has left its folder behind.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                created => {
                    created.unwrap();
                    return Self(path);
                }
            }
        }
    }

    /// Creates the folder, and gives the path of a file in it.
    pub fn with(name: &str) -> (Self, PathBuf) {
        let folder = Self::new();
        let path = folder.file(name);
        (folder, path)
    }

    /// The path of a file in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// The names of the entries of a folder, sorted.
pub fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// Makes the entries of a folder, and those of the folders in it, two hours older.
pub fn age(folder: &Path) {
    let old = SystemTime::now() - Duration::from_secs(2 * 3600);
    for name in names_in(folder) {
        let path = folder.join(name);
        if path.is_dir() {
            age(&path);
        }
        File::open(path).unwrap().set_modified(old).unwrap();
    }
}

/// Where the disk of a test is that runs on a small one.
const SMALL_DISK: &str = "TCH_AMP_SMALL_DISK";

/// The disk of a test that [`run_on_small_disk`] runs.
pub fn small_disk() -> Option<PathBuf> {
    std::env::var_os(SMALL_DISK).map(PathBuf::from)
}

/// Runs an ignored test of this program in a process of its own, for which `folder` is a disk of so many KiB. Skips it
/// where none can be mounted.
pub fn run_on_small_disk(folder: &Path, kib: u32, test: &str) {
    let mounted = format!(r#"mount -t tmpfs -o size={kib}k tmpfs "$0" && "$@""#);
    let folder = folder.to_str().expect("the folder of a test has a plain name");
    let words = ["unshare", "--mount", "--map-root-user", "sh", "-c", &mounted, folder];
    let tried = Command::new(words[0]).args(&words[1..]).arg("true").output();
    if !tried.is_ok_and(|output| output.status.success()) {
        return super::skipped("`unshare` cannot mount a disk here");
    }
    let output = this_test_by(&words, test).env(SMALL_DISK, folder).output();
    let output = output.expect("`unshare` has run before");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("1 passed"), "{said} {output:?}");
}
