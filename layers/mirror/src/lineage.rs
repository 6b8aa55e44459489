//! The lineage of a mirror's content: which openings have changed it, newest first, and how far each is known.
//!
//! A *session* is one opening of the mirror that changed what it holds (or let it be seen, where a crash had left that open).
//! It draws an identity at its first change. The first labels that name it call it unconfirmed: nothing was changed yet. The
//! next ones confirm it, and only then is anything changed. Within a session each label before a change of its own kind has a
//! higher generation. So one label's content descends from another's exactly if it knows the other's newest confirmed
//! session, as far as the other one does, however their generations compare: an older image of a replica that was put back and
//! written alone is told from one that only fell behind.

/// Sessions that a label knows of, at most. An image that is older than all of them is refused: nothing tells any more
/// whether it was written alone.
pub const MAX_SESSIONS: usize = 256;

/// Bytes of a session in a label.
pub(crate) const SESSION_BYTES: usize = 16;

/// Set in the bytes of a session that is not confirmed. Identities have the other 63 bits.
const UNCONFIRMED: u64 = 1 << 63;

/// An opening of the mirror that changed it, or was about to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Session {
    /// Drawn at random, 63 bits.
    pub id: u64,
    /// Something may have been changed in it.
    pub is_confirmed: bool,
    /// The generation of the last label of the session that came before a change, as far as is known here.
    pub until: u64,
}

/// The sessions that a label knows of, newest first.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Lineage {
    sessions: Vec<Session>,
}

impl Lineage {
    /// The sessions, newest first.
    pub fn sessions(&self) -> &[Session] {
        &self.sessions
    }

    /// The last session that may have changed something; nothing where none has.
    pub fn newest(&self) -> Option<Session> {
        self.sessions.iter().find(|session| session.is_confirmed).copied()
    }

    /// What is known of a session, confirmed or not.
    pub fn find(&self, id: u64) -> Option<Session> {
        self.sessions.iter().find(|session| session.id == id).copied()
    }

    /// Whether older sessions may have been forgotten.
    pub fn is_full(&self) -> bool {
        self.sessions.len() >= MAX_SESSIONS
    }

    /// Begins a session of this identity, or one near it that is not there yet, in a label of this generation. Nothing is
    /// changed in it before it is confirmed.
    pub fn begin(&mut self, drawn: u64, events: u64) {
        let mut id = drawn & !UNCONFIRMED;
        while self.find(id).is_some() {
            id = id.wrapping_add(1) & !UNCONFIRMED;
        }
        self.sessions.insert(0, Session { id, is_confirmed: false, until: events });
        self.sessions.truncate(MAX_SESSIONS);
    }

    /// From the label of this generation on, the session that was begun last may change something that it could not before.
    pub fn confirm(&mut self, events: u64) {
        if let Some(session) = self.sessions.first_mut() {
            session.is_confirmed = true;
            session.until = events;
        }
    }

    /// The bytes in a label: [`SESSION_BYTES`] for each session.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.sessions.len() * SESSION_BYTES);
        for session in &self.sessions {
            let word = session.id | if session.is_confirmed { 0 } else { UNCONFIRMED };
            bytes.extend_from_slice(&word.to_le_bytes());
            bytes.extend_from_slice(&session.until.to_le_bytes());
        }
        bytes
    }

    /// The lineage that these bytes say; nothing where there are too many, or one twice.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Lineage> {
        let mut lineage = Lineage::default();
        let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        while let (Some(word), Some(until)) = (words.next(), words.next()) {
            let session = Session { id: word & !UNCONFIRMED, is_confirmed: word & UNCONFIRMED == 0, until };
            if lineage.is_full() || lineage.find(session.id).is_some() {
                return None;
            }
            lineage.sessions.push(session);
        }
        Some(lineage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_counts_once_it_is_confirmed_and_is_known_before() {
        let mut lineage = Lineage::default();
        assert_eq!(lineage.newest(), None);
        lineage.begin(7, 1);
        assert!(lineage.find(7).is_some() && lineage.newest().is_none());
        lineage.confirm(2);
        lineage.begin(7, 3);
        let newest = Session { id: 7, is_confirmed: true, until: 2 };
        assert_eq!((lineage.newest(), lineage.sessions()[0].id), (Some(newest), 8), "nobody has another's identity");
        lineage.begin(u64::MAX, 4);
        lineage.confirm(5);
        assert_eq!(lineage.newest(), Some(Session { id: u64::MAX >> 1, is_confirmed: true, until: 5 }));
        assert_eq!(Lineage::from_bytes(&lineage.to_bytes()), Some(lineage));
    }

    #[test]
    fn the_oldest_sessions_are_forgotten_and_no_more_are_read() {
        let mut lineage = Lineage::default();
        for id in 0..300 {
            lineage.begin(id, 2 * id);
            lineage.confirm(2 * id + 1);
        }
        assert!(lineage.is_full() && lineage.find(299).is_some());
        assert!(lineage.find(44).is_some() && lineage.find(43).is_none());
        let mut bytes = lineage.to_bytes();
        assert_eq!(Lineage::from_bytes(&bytes), Some(lineage));
        bytes.extend_from_slice(&[7; SESSION_BYTES]);
        assert_eq!(Lineage::from_bytes(&bytes), None);
        assert_eq!(Lineage::from_bytes(&[5; 2 * SESSION_BYTES]), None, "one twice");
    }
}
