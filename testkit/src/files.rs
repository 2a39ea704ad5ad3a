//! Folders for the files of a test.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

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

/// The names of the entries of a folder.
pub fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
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
    let on_small_disk = |program: &Path, arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--map-root-user", "sh", "-c", &mounted]).arg(folder);
        command.arg(program).args(arguments).env(SMALL_DISK, folder).output()
    };
    if !on_small_disk(Path::new("true"), &[]).is_ok_and(|output| output.status.success()) {
        return super::skipped("`unshare` cannot mount a disk here");
    }
    let program = std::env::current_exe().expect("a test has a program");
    let arguments = ["--exact", test, "--ignored", "--nocapture"];
    let output = on_small_disk(&program, &arguments).expect("`unshare` has run before");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("1 passed"), "{said} {output:?}");
}
