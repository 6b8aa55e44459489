//! What the cores of a server share: its exports, and which connection has chosen which.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sealblock_layers_cross_core::SharedDevice;
use sealblock_protocols_nbd as core;
use sealblock_runtime_reactor::{Budget, now};
use sealblock_transport::{ControlSignal, Ends, Registration, Serving, Signals, poll_until, work_budget};

use crate::export::{Export, Limits, SetupError};

/// The exports.
#[derive(Default)]
struct ExportList {
    /// An export lives until it has been removed and its last connection has ended.
    exports: Vec<Arc<Export>>,
    /// What clients see of each.
    advertised: Arc<[core::Export]>,
    /// The name of the default export; `None` for the first.
    default: Option<String>,
    /// The choices of connections, by their numbers, as long as they live.
    choices: BTreeMap<u64, Choice>,
}

struct Choice {
    export: Arc<Export>,
    names_none: bool,
    /// The address of the client.
    from: String,
    since: Instant,
    signal: Arc<ControlSignal>,
    /// The session that the client has named, until it is fenced.
    session: Option<core::SessionName>,
}

pub(crate) struct ServerState {
    pub(crate) limits: Limits,
    pub(crate) budget: Arc<Budget>,
    /// The memory for requests without data that have started.
    pub(crate) work_budget: Arc<Budget>,
    pub(crate) serving: Arc<Serving>,
    /// Tracks connections that have ended but were not completely read, and which device each uses.
    pub(crate) ends: Arc<Ends<SharedDevice>>,
    exports: Mutex<ExportList>,
}

/// A connection that uses an export.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Client {
    /// The name of the export.
    pub export: String,
    /// True if it chose the default export, and names none when it connects again.
    pub names_none: bool,
    /// The address or process of the client.
    pub from: String,
    /// Time since it chose the export.
    pub connected: Duration,
}

/// The export that a connection has chosen, until it is dropped.
pub(crate) struct ChosenExport {
    server: Arc<ServerState>,
    number: u64,
    pub(crate) export: Arc<Export>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServerState {
    pub(crate) fn new(limits: Limits) -> ServerState {
        ServerState {
            budget: limits.budget(),
            work_budget: work_budget(limits.total_bytes_in_flight),
            serving: Serving::new(limits.connections, limits.drain),
            limits,
            ends: Arc::default(),
            exports: Mutex::default(),
        }
    }

    /// Returns what clients that connect now see.
    pub(crate) fn advertised(&self) -> Arc<[core::Export]> {
        Arc::clone(&lock(&self.exports).advertised)
    }

    /// Sets the name of the default export. As long as no export has this name, there is no default.
    pub(crate) fn set_default(&self, name: Option<String>) {
        lock(&self.exports).default = name;
    }

    /// The index of the default export among those that a client sees.
    pub(crate) fn default_of(&self, info: &[core::Export]) -> Option<usize> {
        match &lock(&self.exports).default {
            Some(name) => info.iter().position(|export| export.name == *name),
            None => (!info.is_empty()).then_some(0),
        }
    }

    /// Adds an export, after the others.
    pub(crate) fn add(&self, export: Export) -> Result<(), SetupError> {
        let info = export.advertised();
        if !info.is_valid() {
            return Err(SetupError::TooLong(info.name.chars().take(80).collect()));
        }
        let mut offered = lock(&self.exports);
        if offered.advertised.iter().any(|other| other.name == info.name) {
            return Err(SetupError::Duplicate(info.name));
        }
        offered.exports.push(Arc::new(export));
        offered.advertised = offered.advertised.iter().cloned().chain([info]).collect();
        Ok(())
    }

    /// Removes an export, and drains its connections.
    pub(crate) fn remove(&self, name: &str) -> Result<(), SetupError> {
        let (removed, signals): (Arc<Export>, Vec<Arc<ControlSignal>>) = {
            let mut offered = lock(&self.exports);
            let at = offered.advertised.iter().position(|info| info.name == name);
            let at = at.ok_or_else(|| SetupError::Unknown(name.to_owned()))?;
            let others = offered.advertised.iter().enumerate().filter(|(index, _)| *index != at);
            offered.advertised = others.map(|(_, other)| other.clone()).collect();
            let removed = offered.exports.remove(at);
            // Includes connections that chose it before a resize.
            let users = offered.choices.values().filter(|choice| choice.export.is_same(&removed));
            let signals = users.map(|choice| Arc::clone(&choice.signal)).collect();
            (removed, signals)
        };
        signals.iter().for_each(|signal| signal.send(Signals::DRAIN));
        drop(removed);
        Ok(())
    }

    /// Sets the size of an export for clients that connect from now on.
    pub(crate) fn resize(&self, name: &str, device: SharedDevice) -> Result<(), SetupError> {
        let mut offered = lock(&self.exports);
        let at = offered.advertised.iter().position(|info| info.name == name);
        let at = at.ok_or_else(|| SetupError::Unknown(name.to_owned()))?;
        let export = offered.exports[at].resized(device);
        let info = export.advertised();
        if !info.is_valid() {
            return Err(SetupError::TooLong(info.name.chars().take(80).collect()));
        }
        let before = std::mem::replace(&mut offered.exports[at], Arc::new(export));
        offered.advertised =
            offered.advertised.iter().enumerate().map(|(i, was)| if i == at { &info } else { was }).cloned().collect();
        drop(offered);
        drop(before);
        Ok(())
    }

    /// The connections that have chosen an export, in the order in which they connected.
    pub(crate) fn clients(&self) -> Vec<Client> {
        let client = |choice: &Choice| Client {
            export: choice.export.name().to_owned(),
            names_none: choice.names_none,
            from: choice.from.clone(),
            connected: now().saturating_duration_since(choice.since),
        };
        lock(&self.exports).choices.values().map(client).collect()
    }

    /// Records that this connection chose the export that it was shown, if the server still has that export.
    pub(crate) fn choose(
        self: &Arc<Self>,
        connection: &Registration,
        (info, names_none): (&core::Export, bool),
        from: &str,
        session: Option<core::SessionName>,
    ) -> Option<ChosenExport> {
        // Locked until the choice is recorded, so that a later removal of the export finds this connection.
        let mut offered = lock(&self.exports);
        // The export may have grown since then; if it shrank, the client would see too large a size.
        let is_it = |other: &core::Export| {
            other.size_bytes >= info.size_bytes
                && core::Export { size_bytes: other.size_bytes, ..info.clone() } == *other
        };
        let at = offered.advertised.iter().position(is_it)?;
        let (export, signal) = (Arc::clone(&offered.exports[at]), Arc::clone(&connection.signal));
        let choice =
            Choice { export: Arc::clone(&export), names_none, from: from.to_owned(), since: now(), signal, session };
        offered.choices.insert(connection.number, choice);
        Some(ChosenExport { server: Arc::clone(self), number: connection.number, export })
    }
}

impl ChosenExport {
    /// Ends the client's sessions that are older than this one, and waits until they are fenced.
    pub(crate) async fn end_older_sessions(&self) {
        poll_until(|| {
            let older = self.older_sessions();
            older.iter().for_each(|signal| signal.send(Signals::ABORT));
            older.is_empty()
        })
        .await;
    }

    fn older_sessions(&self) -> Vec<Arc<ControlSignal>> {
        let offered = lock(&self.server.exports);
        let Some(own) = offered.choices.get(&self.number).and_then(|choice| choice.session) else { return Vec::new() };
        let is_older = |choice: &&Choice| {
            let named = choice.session.filter(|named| named.client == own.client && named.number < own.number);
            named.is_some()
        };
        offered.choices.values().filter(is_older).map(|choice| Arc::clone(&choice.signal)).collect()
    }

    /// Records that what the connection has in flight is fenced, and that it starts nothing more.
    pub(crate) fn set_fenced(&self) {
        if let Some(choice) = lock(&self.server.exports).choices.get_mut(&self.number) {
            choice.session = None;
        }
    }
}

impl Drop for ChosenExport {
    fn drop(&mut self) {
        let choice = lock(&self.server.exports).choices.remove(&self.number);
        drop(choice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_name_no_export_get_the_default_or_none() {
        let shared = ServerState::new(Limits::default());
        let info = |name: &str| core::Export {
            name: name.to_owned(),
            description: String::new(),
            size_bytes: 4096,
            block_bytes: 512,
            writable: true,
            trim: false,
            write_zeroes: false,
            older: 0,
            identity: core::IdentitySource::default(),
        };
        assert_eq!(shared.default_of(&[]), None);
        assert_eq!(shared.default_of(&[info("b"), info("a")]), Some(0), "the first one is the default");
        shared.set_default(Some("a".to_owned()));
        assert_eq!(shared.default_of(&[info("b"), info("a")]), Some(1));
        assert_eq!(shared.default_of(&[info("b")]), None, "and not another one in its place");
    }
}
