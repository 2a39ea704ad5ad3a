//! The steps of a replacement, as the tests need them: one by one, so that each can fail or be lost.

use std::fs::{self, File, Permissions};
use std::io::{self, Seek, Write};
use std::path::Path;

/// A file system.
pub(crate) trait Disk {
    type File: DiskFile;
    type Folder;

    /// Opens an existing folder.
    fn open_folder(&self, folder: &Path) -> io::Result<Self::Folder>;
    /// Creates a file that does not exist yet.
    fn create_new(&self, path: &Path) -> io::Result<Self::File>;
    /// Renames a file over another one.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Waits until the names in a folder would survive a power loss.
    fn sync_folder(&self, folder: &Self::Folder) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// After how many bytes the data are synced while more are being written.
    fn sync_every(&self) -> u64;
}

/// An open file.
pub(crate) trait DiskFile: Write + Seek + Send + Sized + 'static {
    /// A second handle, for another thread.
    fn try_clone(&self) -> io::Result<Self>;
    /// Waits until the data would survive a power loss.
    fn sync_data(&self) -> io::Result<()>;
    /// Waits until the data and all that is needed to find them would survive a power loss.
    fn sync_all(&self) -> io::Result<()>;
    /// Makes the permissions these, unless they are already.
    fn set_permissions(&self, permissions: &Permissions) -> io::Result<()>;
}

/// The file system of the operating system.
pub(crate) struct Real {
    pub(crate) sync_every: u64,
}

impl Default for Real {
    fn default() -> Self {
        Self { sync_every: 64 << 20 }
    }
}

impl Disk for Real {
    type File = File;
    /// None where a folder cannot be synced.
    type Folder = Option<File>;

    fn open_folder(&self, folder: &Path) -> io::Result<Option<File>> {
        if !fs::metadata(folder)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        if cfg!(unix) { File::open(folder).map(Some) } else { Ok(None) }
    }

    fn create_new(&self, path: &Path) -> io::Result<File> {
        File::create_new(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_folder(&self, folder: &Option<File>) -> io::Result<()> {
        match folder.as_ref().map_or(Ok(()), File::sync_all) {
            // What file systems answer that cannot sync a folder. A failed sync is EIO or the like.
            Err(error) if cannot_sync(error.kind()) => Ok(()),
            result => result,
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_every(&self) -> u64 {
        self.sync_every
    }
}

fn cannot_sync(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

impl DiskFile for File {
    fn try_clone(&self) -> io::Result<Self> {
        Self::try_clone(self)
    }

    fn sync_data(&self) -> io::Result<()> {
        Self::sync_data(self)
    }

    fn sync_all(&self) -> io::Result<()> {
        Self::sync_all(self)
    }

    fn set_permissions(&self, permissions: &Permissions) -> io::Result<()> {
        // File systems without permissions refuse to set them, but give all files the same.
        if self.metadata()?.permissions() == *permissions {
            return Ok(());
        }
        Self::set_permissions(self, permissions.clone())
    }
}
