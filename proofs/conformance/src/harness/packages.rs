//! Debian packages of a suite, fetched and unpacked without installing anything.
//!
//! The harness has its own package lists and counts no packages as installed, so the result does not depend on the
//! machine. Lists and packages come from the server in the machine's own package sources. They may be kept outside the
//! target folder, for later clones.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The key with which suites are signed, as Debian installs it.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The variable with a folder outside the target folder for package lists and packages, so that a clean clone does not
/// fetch them again.
const CACHE_VARIABLE: &str = "SEALBLOCK_CONFORMANCE_CACHE";

/// Something that the machine lacks and that cannot be fetched: the suite is skipped, and this reason is printed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// One suite of the archive. Another process that uses the same folder waits for this one.
pub struct Suite {
    name: &'static str,
    folder: PathBuf,
    /// True if packages are kept after they are unpacked.
    keeps: bool,
    _lock: fs::File,
}

impl Suite {
    /// Updates the package lists of a suite, in the folder that [`CACHE_VARIABLE`] names, or else below `home`.
    /// Existing lists are used if no newer ones can be fetched.
    ///
    /// # Errors
    /// [`Unavailable`] if there is no `apt-get` or no Debian source, or if the server does not respond; the error names
    /// what was not fetched.
    pub fn open(name: &'static str, home: &Path) -> Result<Suite> {
        let cache = std::env::var_os(CACHE_VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let signed_by = if Path::new(KEYRING).exists() { format!("signed-by={KEYRING} ") } else { String::new() };
        let source = format!("deb [{signed_by}arch=amd64 target=Packages] {} {name} main\n", server()?);
        Suite::open_at(name, cache.as_deref().unwrap_or(home), cache.is_some(), &source)
    }

    /// The same with this folder and this line of `sources.list(5)`.
    fn open_at(name: &'static str, folder: &Path, keeps: bool, source: &str) -> Result<Suite> {
        let folder = folder.join("apt").join(name);
        for below in ["lists/partial", "cache/archives/partial", "empty", "debs"] {
            let below = folder.join(below);
            fs::create_dir_all(&below).with_context(|| format!("making {}", below.display()))?;
        }
        let lock = fs::File::create(folder.join("lock")).context("making the lock file of package lists")?;
        lock.lock().context("waiting for the lock file of package lists")?;
        let suite = Suite { name, folder, keeps, _lock: lock };
        fs::write(suite.folder.join("status"), "").context("writing the list of installed packages")?;
        fs::write(suite.folder.join("sources"), source).context("writing the package source")?;
        suite.update()?;
        Ok(suite)
    }

    fn update(&self) -> Result<()> {
        let update = self.command("apt-get").args(["-qq", "--error-on=any", "update"]).output();
        let update = update.map_err(|error| Unavailable(format!("apt-get cannot be run: {error}")))?;
        if update.status.success() {
            return Ok(());
        }
        let why = format!("no new package list of {}: {}", self.name, failed(&String::from_utf8_lossy(&update.stderr)));
        let lists = fs::read_dir(self.folder.join("lists")).context("listing package lists")?.flatten();
        let has_lists = lists.map(|entry| entry.path()).any(|path| path.to_string_lossy().contains("_Packages"));
        if !has_lists {
            bail!(Unavailable(why));
        }
        eprintln!("{why}; going on with the one of before");
        Ok(())
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let mut set = |name: &str, value: &str| {
            command.arg("-o").arg(format!("{name}={value}"));
        };
        for (name, path) in [
            ("Dir::Etc::SourceList", "sources"),
            ("Dir::Etc::SourceParts", "empty"),
            ("Dir::Etc::PreferencesParts", "empty"),
            ("Dir::State::Lists", "lists"),
            ("Dir::State::status", "status"),
            ("Dir::Cache", "cache"),
        ] {
            set(name, &self.folder.join(path).to_string_lossy());
        }
        set("APT::Architecture", "amd64");
        set("Acquire::Languages", "none");
        // A mirror that was not updated for a week still has the listed packages, and the signature is checked in any
        // case.
        set("Acquire::Check-Valid-Until", "false");
        set("Acquire::Retries", "2");
        set("Acquire::http::Timeout", "20");
        set("Acquire::https::Timeout", "20");
        if rustix::process::geteuid().is_root() {
            // The user that apt would switch to may not have access to this folder.
            set("APT::Sandbox::User", "root");
        }
        command.env("LC_ALL", "C").stdin(Stdio::null());
        command
    }

    fn ask(&self, words: &[&str]) -> Result<String> {
        let output = self.command("apt-cache").args(words).output();
        let output = output.map_err(|error| Unavailable(format!("apt-cache cannot be run: {error}")))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// A field of the newest version of a package.
    ///
    /// # Errors
    /// If the package or the field does not exist.
    pub fn field(&self, package: &str, field: &str) -> Result<String> {
        let shown = self.ask(&["show", "--no-all-versions", package])?;
        let line = shown.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(": "));
        let line = line.with_context(|| format!("{} has no package {package} with a field {field}", self.name))?;
        Ok(line.to_owned())
    }

    /// These packages and the libraries that they depend on, without services, interpreters and scripts.
    ///
    /// # Errors
    /// If the lists cannot be read.
    pub fn with_libraries(&self, packages: &[&str]) -> Result<Vec<String>> {
        let all = ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"];
        let without: Vec<String> = all.iter().map(|kind| format!("--no-{kind}")).collect();
        let mut words = vec!["depends", "--recurse"];
        words.extend(without.iter().map(String::as_str));
        words.extend(packages);
        let depends = self.ask(&words)?;
        let wanted: BTreeSet<&str> = depends.lines().filter(|name| is_wanted(name, packages)).collect();
        // The output also has names that only other packages provide; they have no package to fetch.
        let mut words = vec!["madison"];
        words.extend(&wanted);
        let there = self.ask(&words)?;
        let there: BTreeSet<&str> = there.lines().filter_map(|line| Some(line.split_once('|')?.0.trim())).collect();
        if let Some(absent) = packages.iter().find(|package| !there.contains(*package)) {
            bail!("{} has no package {absent}", self.name);
        }
        Ok(there.into_iter().map(str::to_owned).collect())
    }

    /// Fetches missing packages, and unpacks all into `root`.
    ///
    /// # Errors
    /// [`Unavailable`] if packages cannot be fetched; the error names them.
    pub fn unpack(&self, packages: &[String], root: &Path) -> Result<()> {
        let debs = self.folder.join("debs");
        let wanted = self.downloads(packages)?;
        let absent: Vec<&Download> = wanted.iter().filter(|download| !download.is_in(&debs)).collect();
        if !absent.is_empty() {
            let names = absent.iter().map(|download| download.package());
            let fetch = self.command("apt-get").args(["-qq", "download"]).args(names).current_dir(&debs).output();
            let fetch = fetch.map_err(|error| Unavailable(format!("apt-get cannot be run: {error}")))?;
            if let Some(missing) = absent.iter().find(|download| !download.is_in(&debs)) {
                let why = failed(&String::from_utf8_lossy(&fetch.stderr));
                bail!(Unavailable(format!("{} of {} cannot be fetched: {why}", missing.url, self.name)));
            }
        }
        fs::create_dir_all(root).with_context(|| format!("making {}", root.display()))?;
        for download in &wanted {
            let deb = debs.join(&download.file);
            let status = Command::new("dpkg-deb").arg("--extract").arg(&deb).arg(root).status();
            let status = status.map_err(|error| Unavailable(format!("dpkg-deb cannot be run: {error}")))?;
            if !status.success() {
                bail!("unpacking {} failed ({status}); without it, it is fetched anew", deb.display());
            }
        }
        self.tidy(&wanted)
    }

    /// The URLs and file names of these packages.
    fn downloads(&self, packages: &[String]) -> Result<Vec<Download>> {
        let output = self.command("apt-get").args(["-qq", "--print-uris", "download"]).args(packages).output();
        let output = output.map_err(|error| Unavailable(format!("apt-get cannot be run: {error}")))?;
        if !output.status.success() {
            let why = failed(&String::from_utf8_lossy(&output.stderr));
            bail!(Unavailable(format!("packages of {} cannot be found: {why}", self.name)));
        }
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        said.lines().map(|line| Download::of(line).with_context(|| format!("apt-get says '{line}'"))).collect()
    }

    /// Removes packages that are no longer needed: all of them, or, if packages are kept, other versions of these.
    fn tidy(&self, unpacked: &[Download]) -> Result<()> {
        for entry in fs::read_dir(self.folder.join("debs")).context("listing packages")? {
            let path = entry.context("listing packages")?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_old = unpacked.iter().any(|download| download.is_newer_than(&file));
            if !self.keeps || is_old {
                fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
            }
        }
        Ok(())
    }
}

/// A package to fetch.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Download {
    url: String,
    file: String,
    bytes: u64,
}

impl Download {
    /// Parses a line of `apt-get --print-uris`: `'URL' FILE BYTES HASH`.
    fn of(line: &str) -> Option<Download> {
        let (url, rest) = line.strip_prefix('\'')?.split_once("' ")?;
        let mut words = rest.split_whitespace();
        let file = words.next().filter(|file| !file.contains('/') && file.ends_with(".deb"))?;
        Some(Download { url: url.to_owned(), file: file.to_owned(), bytes: words.next()?.parse().ok()? })
    }

    fn package(&self) -> &str {
        self.file.split('_').next().unwrap_or(&self.file)
    }

    /// True if it is complete. `dpkg-deb` checks its content when unpacking it.
    fn is_in(&self, folder: &Path) -> bool {
        fs::metadata(folder.join(&self.file)).is_ok_and(|there| there.is_file() && there.len() == self.bytes)
    }

    /// True if a file is another version of the same package.
    fn is_newer_than(&self, file: &str) -> bool {
        file != self.file && file.split_once('_').is_some_and(|(package, _)| package == self.package())
    }
}

/// The downloads that failed, with the reasons, from the output of apt-get; all of its messages if no download is
/// named.
fn failed(complaints: &str) -> String {
    let lines = complaints.lines().map(str::trim).filter(|line| !line.is_empty());
    let named = |line: &&str| line.contains(":/");
    let mut found: Vec<&str> = lines.clone().filter(named).collect();
    if found.is_empty() {
        found = lines.collect();
    }
    found.dedup();
    let words = found.iter().map(|line| line.trim_start_matches("E: ").trim_start_matches("W: "));
    words.collect::<Vec<_>>().join("; ")
}

fn is_wanted(name: &str, packages: &[&str]) -> bool {
    let unused = ["libpam", "libperl", "libpython"];
    packages.contains(&name)
        || ((name.starts_with("lib") || name.starts_with("zlib"))
            && !unused.iter().any(|prefix| name.starts_with(prefix)))
}

/// The server of this machine's own Debian packages.
fn server() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let codename = codename.unwrap_or("sid").trim_matches('"');
    let mut texts = Vec::new();
    let lists = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut lists: Vec<PathBuf> = lists.chain([PathBuf::from("/etc/apt/sources.list")]).collect();
    lists.sort();
    for path in lists {
        let kind = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap_or_default();
        texts.push((kind, text));
    }
    let found = texts.iter().find_map(|(kind, text)| match kind.as_str() {
        "sources" => in_stanzas(text, codename),
        "list" => in_lines(text, codename),
        _ => None,
    });
    let is_debian = release.lines().any(|line| line == "ID=debian");
    found.filter(|_| is_debian).ok_or_else(|| {
        Unavailable(
            "this machine gets no Debian packages (needed: a Debian system whose sources name a server)".to_owned(),
        )
        .into()
    })
}

/// The server of a suite, from the stanza format of `sources.list(5)`.
fn in_stanzas(text: &str, suite: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).find_map(|stanza| {
        let field = |name: &str| stanza.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let has_suite = field("Suites")?.split_whitespace().any(|name| name == suite);
        let has_binaries = field("Types")?.split_whitespace().any(|kind| kind == "deb");
        let server = field("URIs")?.split_whitespace().next()?;
        (has_suite && has_binaries).then(|| server.to_owned())
    })
}

/// The same from the format with a line for each suite: `deb [options] server suite components`.
fn in_lines(text: &str, suite: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let rest = if rest.starts_with('[') { rest.split_once(']')?.1 } else { rest };
        let mut words = rest.split_whitespace();
        let server = words.next()?;
        (words.next()? == suite).then(|| server.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_of_a_suite_is_found_in_both_formats() {
        let stanzas = "Types: deb-src\nURIs: http://src.test/debian\nSuites: trixie\n\n# a comment\nTypes: deb\n\
            URIs: http://a.test/debian http://b.test/debian\nSuites: trixie trixie-updates\nComponents: main\n";
        assert_eq!(in_stanzas(stanzas, "trixie").as_deref(), Some("http://a.test/debian"));
        assert_eq!(in_stanzas(stanzas, "bookworm"), None);
        let lines = "# deb http://no.test/debian trixie main\ndeb http://sec.test/debian trixie-security main\n\
            deb [arch=amd64 trusted=no] http://c.test/debian trixie main\n";
        assert_eq!(in_lines(lines, "trixie").as_deref(), Some("http://c.test/debian"));
        assert_eq!(in_lines(lines, "sid"), None);
    }

    #[test]
    fn downloads_are_parsed_and_existing_packages_are_skipped() {
        let line = "'http://a.test/debian/pool/main/f/fio/fio_3.33-3_amd64.deb' fio_3.33-3_amd64.deb 5 SHA256:00ff";
        let fio = Download::of(line).unwrap();
        assert_eq!((fio.package(), fio.bytes), ("fio", 5));
        assert!(fio.url.ends_with("/fio_3.33-3_amd64.deb") && fio.url.starts_with("http://a.test/"));
        for line in ["", "'x'", "'x' y.deb", "'x' y.deb many", "'x' ../y.deb 5", "'x' y 5", "x y.deb 5"] {
            assert_eq!(Download::of(line), None, "{line}");
        }
        assert!(fio.is_newer_than("fio_3.30-2_amd64.deb"));
        for other in ["fio_3.33-3_amd64.deb", "fio-examples_3.30-2_all.deb", "fio"] {
            assert!(!fio.is_newer_than(other), "{other}");
        }
        let folder = tempfile::tempdir().unwrap();
        assert!(!fio.is_in(folder.path()));
        fs::write(folder.path().join(&fio.file), "half").unwrap();
        assert!(!fio.is_in(folder.path()), "a part is not there");
        fs::write(folder.path().join(&fio.file), "whole").unwrap();
        assert!(fio.is_in(folder.path()));
    }

    #[test]
    fn failed_downloads_are_named() {
        let said = "E: Failed to fetch http://a.test/pool/x_1_amd64.deb  404  Not Found [IP: 192.0.2.1 80]\n\
            E: Some files failed to download\n";
        assert_eq!(failed(said), "Failed to fetch http://a.test/pool/x_1_amd64.deb  404  Not Found [IP: 192.0.2.1 80]");
        assert_eq!(failed("E: no room\n\nE: none at all\n"), "no room; none at all");
    }

    /// An archive with one package, in a folder; its Release file has long expired.
    fn archive(folder: &Path) -> Option<String> {
        let tree = folder.join("tree");
        fs::create_dir_all(tree.join("DEBIAN")).unwrap();
        fs::write(tree.join("content"), "of the package").unwrap();
        let control =
            "Package: thing\nVersion: 1\nArchitecture: amd64\nMaintainer: a <a@b.test>\nDescription: a thing\n";
        fs::write(tree.join("DEBIAN/control"), control).unwrap();
        let lists = folder.join("dists/sid/main/binary-amd64");
        fs::create_dir_all(&lists).unwrap();
        let deb = folder.join("thing_1_amd64.deb");
        let built = Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(&tree).arg(&deb).output();
        let has_apt = Command::new("apt-get").arg("--version").output().is_ok();
        if !has_apt || !built.is_ok_and(|built| built.status.success()) {
            return None;
        }
        let sum = |path: &Path| {
            let output = Command::new("sha256sum").arg(path).output().unwrap();
            String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
        };
        let bytes = fs::metadata(&deb).unwrap().len();
        let packages = format!("{control}Filename: thing_1_amd64.deb\nSize: {bytes}\nSHA256: {}\n", sum(&deb));
        fs::write(lists.join("Packages"), &packages).unwrap();
        let release = format!(
            "Suite: sid\nCodename: sid\nArchitectures: amd64\nComponents: main\nDate: Sat, 01 Jan 2022 00:00:00 UTC\n\
             Valid-Until: Sat, 08 Jan 2022 00:00:00 UTC\nSHA256:\n {} {} main/binary-amd64/Packages\n",
            sum(&lists.join("Packages")),
            packages.len()
        );
        fs::write(folder.join("dists/sid/Release"), release).unwrap();
        Some(format!("deb [trusted=yes arch=amd64 target=Packages] copy:{} sid main\n", folder.display()))
    }

    #[test]
    fn failures_are_named_and_what_was_fetched_is_kept() {
        let [server, cache, root] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let Some(source) = archive(server.path()) else {
            return eprintln!("skipped: there is no apt-get or dpkg-deb here");
        };
        let things = ["thing".to_owned()];
        let unpack = |keeps: bool, into: &str| {
            let suite = Suite::open_at("sid", cache.path(), keeps, &source)?;
            suite.unpack(&suite.with_libraries(&["thing"])?, &root.path().join(into))?;
            anyhow::Ok(fs::read_to_string(root.path().join(into).join("content"))?)
        };
        assert_eq!(unpack(false, "first").unwrap(), "of the package");
        // The date of an archive without a signature is not checked, so this test only shows that apt accepts the
        // option that disables the check.
        let suite = Suite::open_at("sid", cache.path(), false, &source).unwrap();
        assert!(suite.command("apt-get").get_args().any(|word| word == "Acquire::Check-Valid-Until=false"));
        drop(suite);
        // No package was kept, so it is reported as missing once the server no longer has it.
        fs::rename(server.path().join("thing_1_amd64.deb"), server.path().join("away")).unwrap();
        let error = unpack(true, "second").unwrap_err();
        assert!(error.downcast_ref::<Unavailable>().is_some());
        assert!(error.to_string().contains("/thing_1_amd64.deb of sid cannot be fetched: "), "{error}");
        fs::rename(server.path().join("away"), server.path().join("thing_1_amd64.deb")).unwrap();
        assert_eq!(unpack(true, "third").unwrap(), "of the package");
        // The whole server is gone: earlier lists and packages are used.
        fs::remove_dir_all(server.path()).unwrap();
        assert_eq!(unpack(true, "fourth").unwrap(), "of the package");
        // In a folder without lists, the error names the lists that are needed.
        let nowhere = tempfile::tempdir().unwrap();
        let error = Suite::open_at("sid", nowhere.path(), true, &source).err().unwrap().to_string();
        assert!(error.contains("no new package list of sid: ") && error.contains("dists/sid"), "{error}");
        let suite = Suite::open_at("sid", cache.path(), true, &source).unwrap();
        assert_eq!(suite.downloads(&things).unwrap()[0].file, "thing_1_amd64.deb");
    }

    #[test]
    fn libraries_are_wanted_and_services_are_not() {
        for name in ["fio", "libc6", "libgcc-s1"] {
            assert!(is_wanted(name, &["fio"]), "{name}");
        }
        for name in ["  Depends: libc6", "<libc6>", "perl-base", "libpam-modules", "systemd"] {
            assert!(!is_wanted(name, &["fio"]), "{name}");
        }
    }
}
