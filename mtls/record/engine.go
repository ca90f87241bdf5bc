package record

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"sync"
)

// Numbers of RFC 8446: content types (B.1), handshake types (B.3), alerts (6).
const (
	typeAlert           = 21
	typeHandshake       = 22
	typeApplicationData = 23

	msgNewSessionTicket = 4
	msgKeyUpdate        = 24

	alertCloseNotify       = 0
	alertUnexpectedMessage = 10
	alertBadRecordMAC      = 20
	alertRecordOverflow    = 22
	alertDecodeError       = 50
	alertIllegalParameter  = 47
	alertUserCanceled      = 90
)

const (
	// maxUseless bounds records in a row that bring no application data, as crypto/tls does.
	maxUseless = 16
	// maxMessage bounds a handshake message after the handshake: a ticket's length field allows more than 64 KiB, sane ones have some hundred bytes.
	maxMessage = 32 << 10
	// rekeyAfter is how many records one key seals: under the 2^24.5 that RFC 8446 5.5 allows AES-GCM.
	rekeyAfter = 1 << 24
)

// keyLog keeps the two application secrets out of the lines that crypto/tls
// writes for debuggers. Nothing leaves memory, but what a KeyLogWriter of the
// caller's own asked for.
type keyLog struct {
	next           io.Writer
	client, server []byte
}

func (k *keyLog) Write(line []byte) (int, error) {
	// <label> <client random> <secret>, all hex, one line a call.
	f := bytes.Fields(line)
	if len(f) == 3 {
		var to *[]byte
		switch string(f[0]) {
		case "CLIENT_TRAFFIC_SECRET_0":
			to = &k.client
		case "SERVER_TRAFFIC_SECRET_0":
			to = &k.server
		}
		if to != nil {
			b := make([]byte, hex.DecodedLen(len(f[2])))
			if _, err := hex.Decode(b, f[2]); err != nil {
				return 0, fmt.Errorf("record: key log: %w", err)
			}
			*to = b
		}
	}
	n, err := len(line), error(nil)
	if k.next != nil {
		n, err = k.next.Write(line)
	}
	clear(line) // crypto/tls made it for this call alone, and would leave the secret behind in it
	return n, err
}

// forget wipes the secrets; k may be nil.
func (k *keyLog) forget() {
	if k != nil {
		clear(k.client)
		clear(k.server)
		k.client, k.server = nil, nil
	}
}

// half is one direction: its key and its count of records.
type half struct {
	hash   func() hash.Hash
	keyLen int
	secret []byte
	aead   cipher.AEAD
	iv     [12]byte
	nonce  [12]byte // here, so that passing it on allocates nothing
	seq    uint64
}

func (h *half) init(secret []byte) error {
	key, err := expandLabel(h.hash, secret, "key", h.keyLen)
	if err != nil {
		return err
	}
	iv, err := expandLabel(h.hash, secret, "iv", len(h.iv))
	if err != nil {
		return err
	}
	block, err := aes.NewCipher(key)
	clear(key)
	if err != nil {
		return fmt.Errorf("record: cipher: %w", err)
	}
	if h.aead, err = cipher.NewGCM(block); err != nil {
		return fmt.Errorf("record: cipher: %w", err)
	}
	copy(h.iv[:], iv)
	clear(iv)
	clear(h.nonce[:]) // an earlier generation's
	h.secret, h.seq = secret, 0
	return nil
}

// update moves to the next generation of keys (RFC 8446 7.2).
func (h *half) update() error {
	next, err := expandLabel(h.hash, h.secret, "traffic upd", len(h.secret))
	if err != nil {
		return err
	}
	clear(h.secret)
	return h.init(next)
}

// next returns the nonce of the next record (RFC 8446 5.3).
func (h *half) next() []byte {
	h.nonce = h.iv
	binary.BigEndian.PutUint64(h.nonce[4:], binary.BigEndian.Uint64(h.nonce[4:])^h.seq)
	h.seq++
	return h.nonce[:]
}

// expandLabel is HKDF-Expand-Label with an empty context (RFC 8446 7.1).
func expandLabel(h func() hash.Hash, secret []byte, label string, n int) ([]byte, error) {
	label = "tls13 " + label
	info := make([]byte, 0, 4+len(label))
	info = append(info, byte(n>>8), byte(n), byte(len(label)))
	info = append(append(info, label...), 0)
	b, err := hkdf.Expand(h, secret, string(info), n)
	if err != nil {
		return nil, fmt.Errorf("record: key schedule: %w", err)
	}
	return b, nil
}

// partPool holds buffers for records that arrive in pieces.
var partPool = sync.Pool{New: func() any { return new([MaxRecord]byte) }}

// engine is TLS 1.3 with AES-GCM after the handshake.
type engine struct {
	client bool // this end

	// Reading half.
	in      half
	fed     []byte // borrowed, not opened yet
	part    *[MaxRecord]byte
	n       int              // bytes in part
	used    *[MaxRecord]byte // an earlier part, whose plaintext may still be in the caller's hands until the next Feed
	plain   []byte           // opened, not read yet
	hand    []byte           // incomplete handshake message
	kept    int              // bytes of fed and plain that are copies of our own; 0: they are borrowed
	useless int
	rerr    error // for good

	// Writing half.
	mu     sync.Mutex
	out    half
	answer bool  // a key update was asked for
	alert  int   // to be sent before the end; -1: none
	closed bool  // an alert ended this direction
	werr   error // for good
}

var (
	_ InPlace = (*engine)(nil)
	_ Rekeyer = (*engine)(nil)
)

// newEngine takes over with the secrets in keys, which it wipes or owns; nil: it
// cannot, because the suite is none of its own.
func newEngine(suite uint16, client bool, keys *keyLog) *engine {
	e := &engine{client: client, alert: -1}
	switch suite {
	case tls.TLS_AES_128_GCM_SHA256:
		e.in.hash, e.in.keyLen = sha256.New, 16
	case tls.TLS_AES_256_GCM_SHA384:
		e.in.hash, e.in.keyLen = sha512.New384, 32
	default:
		return nil
	}
	e.out.hash, e.out.keyLen = e.in.hash, e.in.keyLen
	read, write := keys.client, keys.server
	if client {
		read, write = write, read
	}
	if read == nil || write == nil {
		return nil
	}
	if e.in.init(read) != nil || e.out.init(write) != nil {
		return nil
	}
	keys.client, keys.server = nil, nil // the halves own them now
	return e
}

func (e *engine) Feed(cipher []byte) {
	e.kept = 0
	if len(e.plain) > 0 { // fed before everything was read: it lies in what was fed before, or in used
		e.plain = slices.Clone(e.plain)
		e.kept = cap(e.plain)
	}
	e.reuse()
	if len(e.fed) > 0 {
		cipher = slices.Concat(e.fed, cipher)
		e.kept += cap(cipher)
	}
	e.fed = cipher
}

func (e *engine) Partial() bool { return e.n > 0 || len(e.hand) > 0 }

func (e *engine) Held() int {
	n := cap(e.hand)
	if e.part != nil {
		n += MaxRecord
	}
	if e.used != nil {
		n += MaxRecord
	}
	if len(e.fed)+len(e.plain) > 0 {
		n += e.kept
	}
	return n
}

// reuse gives back the buffer of a record whose plaintext nobody holds any more.
func (e *engine) reuse() {
	if e.used != nil {
		partPool.Put(e.used)
		e.used = nil
	}
}

func (e *engine) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(e.plain) == 0 {
		b, err := e.open()
		if err != nil {
			e.reuse() // an idle connection holds no buffer
			return 0, err
		}
		e.plain = b
	}
	n := copy(p, e.plain)
	e.plain = e.plain[n:]
	return n, nil
}

func (e *engine) Next() ([]byte, error) {
	if b := e.plain; len(b) > 0 {
		e.plain = nil
		return b, nil
	}
	return e.open()
}

// open returns the plaintext of the next record of application data.
func (e *engine) open() ([]byte, error) {
	for e.rerr == nil {
		rec, err := e.record()
		if err != nil {
			return nil, err
		}
		typ, b, err := e.decrypt(rec)
		if err != nil {
			return nil, err
		}
		if typ == typeApplicationData && len(b) > 0 {
			e.useless = 0
			if len(e.hand) > 0 { // RFC 8446 5.1: messages are not interleaved
				return nil, e.fail(alertUnexpectedMessage, "application data inside a handshake message")
			}
			return b, nil
		}
		if e.useless++; e.useless > maxUseless {
			return nil, e.fail(alertUnexpectedMessage, "too many records without data")
		}
		switch typ {
		case typeApplicationData:
		case typeHandshake:
			err = e.handshake(b)
		case typeAlert:
			err = e.alerted(b)
		default:
			err = e.fail(alertUnexpectedMessage, fmt.Sprintf("a record of content type %d", typ))
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, e.rerr
}

// record returns the next whole record, in the bytes fed or in a buffer of its
// own when it came in pieces. ErrMore: there is none, and nothing is borrowed any more.
func (e *engine) record() ([]byte, error) {
	if e.n == 0 {
		if len(e.fed) >= headerLen {
			need, err := e.length(e.fed)
			if err != nil {
				return nil, err
			}
			if len(e.fed) >= need {
				rec := e.fed[:need]
				e.fed = e.fed[need:]
				return rec, nil
			}
		}
		if len(e.fed) == 0 {
			return nil, ErrMore
		}
		if e.part == nil {
			e.part = partPool.Get().(*[MaxRecord]byte)
		}
	}
	if e.n < headerLen {
		e.take(headerLen)
	}
	if e.n >= headerLen {
		need, err := e.length(e.part[:])
		if err != nil {
			return nil, err
		}
		if e.take(need); e.n == need {
			rec := e.part[:need]
			// The buffer outlives the record by one Feed; another one is never
			// finished before, since only one record can lie across a border.
			e.used, e.part, e.n = e.part, nil, 0
			return rec, nil
		}
	}
	return nil, ErrMore
}

// take moves fed bytes into part until it holds n or nothing is left.
func (e *engine) take(n int) {
	k := copy(e.part[e.n:n], e.fed)
	e.n += k
	e.fed = e.fed[k:]
}

// length returns the bytes on the wire of the record that begins with hdr.
func (e *engine) length(hdr []byte) (int, error) {
	n := headerLen + int(binary.BigEndian.Uint16(hdr[3:]))
	if n > MaxRecord {
		return 0, e.fail(alertRecordOverflow, fmt.Sprintf("a record of %d bytes", n))
	}
	// RFC 8446 5: behind the handshake everything is protected, so looks like
	// application data; the version field is to be ignored (5.2).
	if hdr[0] != typeApplicationData {
		return 0, e.fail(alertUnexpectedMessage, fmt.Sprintf("an unprotected record of type %d", hdr[0]))
	}
	return n, nil
}

// decrypt opens rec where it lies and returns its inner type and content.
func (e *engine) decrypt(rec []byte) (byte, []byte, error) {
	b, err := e.in.aead.Open(rec[headerLen:headerLen], e.in.next(), rec[headerLen:], rec[:headerLen])
	if err != nil {
		return 0, nil, e.fail(alertBadRecordMAC, "a record that does not authenticate")
	}
	if len(b) > MaxPlain+1 {
		return 0, nil, e.fail(alertRecordOverflow, fmt.Sprintf("%d bytes of plaintext in a record", len(b)))
	}
	i := len(b) - 1
	for i >= 0 && b[i] == 0 { // padding (RFC 8446 5.4)
		i--
	}
	if i < 0 {
		return 0, nil, e.fail(alertUnexpectedMessage, "a record of nothing but padding")
	}
	return b[i], b[:i], nil
}

// handshake takes messages that come after the handshake (RFC 8446 4.6).
func (e *engine) handshake(b []byte) error {
	if len(b) == 0 { // RFC 8446 5.1
		return e.fail(alertUnexpectedMessage, "an empty handshake record")
	}
	if len(e.hand)+len(b) > maxMessage {
		return e.fail(alertUnexpectedMessage, "a handshake message that does not end")
	}
	e.hand = append(e.hand, b...)
	for len(e.hand) >= 4 {
		n := 4 + (int(e.hand[1])<<16 | int(binary.BigEndian.Uint16(e.hand[2:])))
		if n > maxMessage {
			return e.fail(alertUnexpectedMessage, fmt.Sprintf("a handshake message of %d bytes", n))
		}
		if len(e.hand) < n {
			return nil
		}
		switch typ, body := e.hand[0], e.hand[4:n]; typ {
		case msgNewSessionTicket: // nothing is resumed here; servers send it (RFC 8446 4.6.1)
			if !e.client {
				return e.fail(alertUnexpectedMessage, "a session ticket, as a client")
			}
		case msgKeyUpdate:
			if len(body) != 1 {
				return e.fail(alertDecodeError, "a malformed key update")
			}
			if body[0] > 1 {
				return e.fail(alertIllegalParameter, "a malformed key update")
			}
			if len(e.hand) > n { // RFC 8446 5.1: keys change at the end of a record
				return e.fail(alertUnexpectedMessage, "a key update inside a record")
			}
			if err := e.in.update(); err != nil {
				e.rerr = err
				return err
			}
			if body[0] == 1 {
				e.mu.Lock()
				e.answer = true // one answer serves any number of requests (RFC 8446 4.6.3)
				e.mu.Unlock()
			}
		default:
			return e.fail(alertUnexpectedMessage, fmt.Sprintf("a handshake message of type %d", typ))
		}
		e.hand = e.hand[n:]
	}
	if len(e.hand) == 0 {
		e.hand = nil
	}
	return nil
}

func (e *engine) alerted(b []byte) error {
	if len(b) != 2 || len(e.hand) > 0 {
		return e.fail(alertDecodeError, "a malformed alert")
	}
	switch b[1] {
	case alertCloseNotify:
		e.rerr = io.EOF
	case alertUserCanceled: // says nothing by itself; close_notify follows (RFC 8446 6.1)
	default:
		e.rerr = fmt.Errorf("record: remote error: %w", tls.AlertError(b[1]))
		e.mu.Lock()
		e.closed = true
		e.werr = e.rerr
		e.mu.Unlock()
	}
	if e.rerr != nil {
		e.drop()
	}
	return e.rerr
}

// fail ends both directions and leaves the alert to be taken.
func (e *engine) fail(alert int, got string) error {
	e.rerr = fmt.Errorf("record: the peer sent %s: %w", got, tls.AlertError(alert))
	e.drop()
	e.mu.Lock()
	if !e.closed && e.werr == nil {
		e.alert = alert
		e.werr = e.rerr
	}
	e.mu.Unlock()
	return e.rerr
}

// drop lets go of what is borrowed. Plaintext in used stays until the next Feed.
func (e *engine) drop() {
	e.fed, e.hand = nil, nil
	if e.part != nil {
		partPool.Put(e.part)
		e.part, e.n = nil, 0
	}
}

var errClosed = errors.New("record: sealing after close_notify")

func (e *engine) Seal(dst, p []byte) ([]byte, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	dst = slices.Grow(dst, len(p)+(len(p)/MaxPlain+1)*(Head+Tail))
	dst = e.takeLocked(dst)
	for len(p) > 0 {
		if err := e.readyLocked(); err != nil {
			return dst, err
		}
		if e.out.seq >= rekeyAfter {
			if dst = e.rekeyLocked(dst, 0); e.werr != nil {
				return dst, e.werr
			}
		}
		n := min(len(p), MaxPlain)
		dst = e.sealLocked(dst, typeApplicationData, p[:n])
		p = p[n:]
	}
	return dst, e.readyLocked()
}

func (e *engine) SealRecord(b []byte, n int) ([]byte, error) {
	if n < 1 || n > MaxPlain {
		panic("record: SealRecord of no plaintext, or of too much")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.readyLocked(); err != nil {
		return nil, err
	}
	b = b[:Head+n+Tail]
	e.finishLocked(b, typeApplicationData)
	return b, nil
}

func (e *engine) CloseNotify(dst []byte) []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	dst = e.takeLocked(dst)
	if e.readyLocked() == nil {
		dst = e.sealLocked(dst, typeAlert, []byte{1, alertCloseNotify})
		e.closed = true
	}
	return dst
}

func (e *engine) Pending() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pendingLocked()
}

func (e *engine) Take(dst []byte) []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.takeLocked(dst)
}

// pendingLocked also asks for new keys when the old ones are spent: SealRecord
// cannot put a key update before its record, Take can.
func (e *engine) pendingLocked() bool {
	return e.alert >= 0 || !e.closed && e.werr == nil && (e.answer || e.out.seq >= rekeyAfter)
}

func (e *engine) takeLocked(dst []byte) []byte {
	if !e.pendingLocked() {
		return dst
	}
	if e.alert >= 0 {
		dst = e.sealLocked(dst, typeAlert, []byte{2, byte(e.alert)})
		e.alert, e.closed = -1, true
		return dst
	}
	return e.rekeyLocked(dst, 0)
}

func (e *engine) Rekey(dst []byte) []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	dst = e.takeLocked(dst)
	if e.readyLocked() != nil {
		return dst
	}
	return e.rekeyLocked(dst, 1)
}

// rekeyLocked announces new keys and moves to them; ask 1: the peer is to do the same.
func (e *engine) rekeyLocked(dst []byte, ask byte) []byte {
	dst = e.sealLocked(dst, typeHandshake, []byte{msgKeyUpdate, 0, 0, 1, ask})
	e.answer = false
	if err := e.out.update(); err != nil {
		e.werr = err
	}
	return dst
}

func (e *engine) readyLocked() error {
	switch {
	case e.werr != nil:
		return e.werr
	case e.closed:
		return errClosed
	}
	return nil
}

// sealLocked appends one record.
func (e *engine) sealLocked(dst []byte, typ byte, p []byte) []byte {
	at := len(dst)
	dst = slices.Grow(dst, len(p)+Head+Tail)[:at+Head+len(p)+Tail]
	copy(dst[at+Head:], p)
	e.finishLocked(dst[at:], typ)
	return dst
}

// finishLocked seals rec, a record but for its header, type and tag.
func (e *engine) finishLocked(rec []byte, typ byte) {
	n := len(rec) - headerLen
	rec[0], rec[1], rec[2] = typeApplicationData, 3, 3
	binary.BigEndian.PutUint16(rec[3:], uint16(n))
	end := len(rec) - e.out.aead.Overhead()
	rec[end-1] = typ
	e.out.aead.Seal(rec[headerLen:headerLen], e.out.next(), rec[headerLen:end], rec[:headerLen])
}
