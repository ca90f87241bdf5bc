package sniff

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"aether/e2e/testseed"
)

const (
	v1 = 1
	v2 = 0x6b3343cf
)

// sealer protects packets as a client does; written from RFC 9001 with HMAC and AES alone, to
// be the other side of what is tested.
type sealer struct {
	version    uint32
	dcid, scid []byte
	key, iv    []byte
	hp         []byte
}

func newSealer(version uint32, dcid []byte) *sealer {
	return (&sealer{version: version, dcid: dcid, scid: []byte{1, 2, 3}}).keysFrom(dcid, "client in")
}

func (s *sealer) keysFrom(dcid []byte, side string) *sealer {
	salts := map[uint32]string{
		v1:         "38762cf7f55934b34d179ae6a4c80cadccbb7f0a",
		v2:         "0dede3def700a6db819381be6e269dcbf9bd2ed9",
		0xff00001d: "afbfec289993d24c9e9786f19c6111e04390a899",
		0xff000017: "c3eef712c72ebb5a11a7d2432bb46365bef9f502",
	}
	mac := func(key []byte, data ...byte) []byte {
		m := hmac.New(sha256.New, key)
		m.Write(data)
		return m.Sum(nil)
	}
	expand := func(secret []byte, label string, n int) []byte {
		label = "tls13 " + label
		info := append([]byte{0, byte(n), byte(len(label))}, label...)
		return mac(secret, append(info, 0, 1)...)[:n]
	}
	prefix := "quic "
	if s.version == v2 {
		prefix = "quicv2 "
	}
	salt, _ := hex.DecodeString(salts[s.version])
	secret := expand(mac(salt, dcid...), side, 32)
	s.key, s.iv, s.hp = expand(secret, prefix+"key", 16), expand(secret, prefix+"iv", 12), expand(secret, prefix+"hp", 16)
	return s
}

// varintOf is n in the shortest form that has room for it, or in size bytes.
func varintOf(n uint64, size ...int) []byte {
	for i, l := range []int{1, 2, 4, 8} {
		if len(size) > 0 && l != size[0] || n >= 1<<(8*l-2) {
			continue
		}
		b := binary.BigEndian.AppendUint64(nil, n|uint64(i)<<(8*l-2))
		return b[8-l:]
	}
	panic("too big for a varint")
}

// kindBits are the type bits of a packet.
func (s *sealer) kindBits(kind QUICPackets) byte {
	bits := map[QUICPackets]byte{QUICInitial: 0, QUICZeroRTT: 1, QUICHandshake: 2, QUICRetry: 3}[kind]
	if s.version == v2 {
		bits = (bits + 1) & 3
	}
	return bits << 4
}

func (s *sealer) start(kind QUICPackets, low byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{0xc0 | s.kindBits(kind) | low}, s.version)
	b = append(append(b, byte(len(s.dcid))), s.dcid...)
	return append(append(b, byte(len(s.scid))), s.scid...)
}

// opaque is a packet that nobody but the server can read.
func (s *sealer) opaque(kind QUICPackets, n int) []byte {
	b := s.start(kind, 1)
	if kind == QUICInitial {
		b = append(b, 0) // no token
	}
	return append(append(b, varintOf(uint64(n))...), bytes.Repeat([]byte{0xa5}, n)...)
}

func (s *sealer) initial(number uint32, payload []byte) []byte {
	return s.initialLike(number, 4, 0, nil, payload)
}

// initialLike seals an Initial with a packet number of size bytes, reserved bits and a token.
func (s *sealer) initialLike(number uint32, size int, reserved byte, token, payload []byte) []byte {
	if len(payload) < 4 {
		payload = append(slices.Clip(payload), make([]byte, 4-len(payload))...)
	}
	b := s.start(QUICInitial, byte(size-1)|reserved)
	b = append(append(b, varintOf(uint64(len(token)))...), token...)
	b = append(b, varintOf(uint64(size+len(payload)+16), 2)...)
	at := len(b)
	b = append(b, binary.BigEndian.AppendUint32(nil, number)[4-size:]...)
	nonce := slices.Clone(s.iv)
	for i := range 4 {
		nonce[8+i] ^= byte(number >> (24 - 8*i))
	}
	block, _ := aes.NewCipher(s.key)
	aead, _ := cipher.NewGCM(block)
	b = aead.Seal(b, nonce, payload, bytes.Clone(b))
	mask := make([]byte, 16)
	block, _ = aes.NewCipher(s.hp)
	block.Encrypt(mask, b[at+4:at+20])
	b[0] ^= mask[0] & 15
	for i := range size {
		b[at+i] ^= mask[1+i]
	}
	return b
}

func cryptoFrame(offset int, data []byte) []byte {
	return slices.Concat([]byte{frameCrypto}, varintOf(uint64(offset)), varintOf(uint64(len(data))), data)
}

// quicHello is the ClientHello that crypto/tls sends over QUIC.
func quicHello(t testing.TB, c *tls.Config) []byte {
	t.Helper()
	c = c.Clone()
	c.MinVersion, c.MaxVersion = tls.VersionTLS13, 0
	q := tls.QUICClient(&tls.QUICConfig{TLSConfig: c})
	defer q.Close()
	q.SetTransportParameters([]byte{4, 4, 0x80, 0, 0xff, 0xff})
	if err := q.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	var hello []byte
	for e := q.NextEvent(); e.Kind != tls.QUICNoEvent; e = q.NextEvent() {
		if e.Kind == tls.QUICWriteData {
			hello = append(hello, e.Data...)
		}
	}
	return hello
}

func showQUIC(r QUICResult) string {
	s := r.Proto.String()
	if r.Proto == QUIC {
		s += fmt.Sprintf(" %08x %x", r.Version, r.DCID)
	}
	if r.More {
		s += " more"
	}
	if c := columns(r.Hello); strings.Join(c, "") != "-----" {
		s += " " + strings.Join(c, " ")
	}
	return s
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var rfcDCID = []byte{0x83, 0x94, 0xc8, 0xf0, 0x3e, 0x51, 0x57, 0x08}

// rfcHello is the CRYPTO frame of RFC 9001 appendix A.2.
const rfcHello = "060040f1010000ed0303ebf8fa56f12939b9584a3896472ec40bb863cfd3e86804fe3a47f06a2b69484c" +
	"00000413011302010000c000000010000e00000b6578616d706c652e636f6dff01000100000a00080006001d0017001800100007" +
	"000504616c706e000500050100000000003300260024001d00209370b2c9caa47fbabaf4559fedba753de171fa71f50f1ce15d43" +
	"e994ec74d748002b0003020304000d0010000e0403050306030203080408050806002d00020101001c00024001003900320408ff" +
	"ffffffffffffff05048000ffff07048000ffff0801100104800075300901100f088394c8f03e51570806048000ffff"

// TestQUICVectors: RFC 9001 appendix A and RFC 9369 appendix A. Of a packet that is sealed here the
// beginning and the tag, which is over all of it, are compared with what is printed there.
func TestQUICVectors(t *testing.T) {
	payload := append(unhex(t, rfcHello), make([]byte, 1162-len(rfcHello)/2)...)
	for _, tt := range []struct {
		version               uint32
		key, iv, hp, from, to string
	}{
		{v1, "1f369613dd76d5467730efcbe3b1a22d", "fa044b2f42a3fd3b46fb255c", "9f50449e04a0e810283a1e9933adedd2",
			"c000000001088394c8f03e5157080000449e7b9aec34d1b1c98dd7689fb8ec11", "e221af44860018ab0856972e194cd934"},
		{v2, "8b1a0bc121284290a29e0971b5cd045d", "91f73e2351d8fa91660e909f", "45b95e15235d6f45a6b19cbcb0294ba9",
			"d76b3343cf088394c8f03e5157080000449ea0c95e82ffe67b6abcdb4298b485", "a18b2faa745b6fe189cf772a9f84cbfc"},
	} {
		s := newSealer(tt.version, rfcDCID)
		s.scid = nil
		if k, i, h := hex.EncodeToString(s.key), hex.EncodeToString(s.iv), hex.EncodeToString(s.hp); k != tt.key || i != tt.iv || h != tt.hp {
			t.Errorf("%08x: key %s, iv %s, hp %s", tt.version, k, i, h)
		}
		b := s.initial(2, payload)
		if len(b) != 1200 || !bytes.HasPrefix(b, unhex(t, tt.from)) || !bytes.HasSuffix(b, unhex(t, tt.to)) {
			t.Errorf("%08x: %d bytes, %x ... %x", tt.version, len(b), b[:32], b[len(b)-16:])
		}
		var q QUICState
		want := fmt.Sprintf("quic %08x 8394c8f03e515708 example.com alpn - 001d 0304", tt.version)
		if got := showQUIC(q.Datagram(b)); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
	// A.3 and A.4: what a server answers is recognized and not read.
	server := unhex(t, "cf000000010008f067a5502a4262b5004075c0d95a482cd0991cd25b0aac406a5816b6394100f37a1c69797554780bb3"+
		"8cc5a99f5ede4cf73c3ec2493a1839b3dbcba3f6ea46c5b7684df3548e7ddeb9c3bf9c73cc3f3bded74b562bfb19fb84022f8ef4cdd93795d77d06edbb7aaf2f58891850abbdca3d20398c276456cbc42158407dd074ee")
	retry := unhex(t, "ff000000010008f067a5502a4262b5746f6b656e04a265ba2eff4d829058fb3f0f2496ba")
	for _, tt := range []struct {
		in   []byte
		want QUICPackets
	}{{server, QUICInitial}, {retry, QUICRetry}} {
		var q QUICState
		if r := q.Datagram(tt.in); r.Packets != tt.want || showQUIC(r) != "none more" {
			t.Errorf("%.20x: packets %b, %s", tt.in, r.Packets, showQUIC(r))
		}
	}
}

// TestQUICFlows holds the flows of the captures against their labels, in every order
// of their first datagrams.
func TestQUICFlows(t *testing.T) {
	random := testseed.Rand(t)
	rows := testdata(t, "quic.tsv")
	orders := 0
	for _, row := range rows {
		var datagrams [][]byte
		for _, s := range strings.Fields(row[8]) {
			datagrams = append(datagrams, decode64(t, s))
		}
		check := func(order [][]byte) {
			var q QUICState
			for _, b := range order {
				q.Datagram(b)
			}
			r := q.Last()
			if r.Proto == Unknown && row[1] == "opaque" {
				return
			}
			version, _ := strconv.ParseUint(strings.TrimPrefix(row[2], "0x"), 16, 32)
			if r.Proto.String() != row[1] || r.Version != uint32(version) {
				t.Errorf("%s: %s, want %s %s", row[0], showQUIC(r), row[1], row[2])
			}
			agrees(t, row[0], r.Hello, row[3:8])
		}
		check(datagrams)
		var long [][]byte // a flow does not begin with a short header
		for _, b := range datagrams {
			if b[0]&longForm != 0 {
				long = append(long, b)
			}
		}
		for range 30 * min(1, len(long)) {
			random.Shuffle(len(long), func(i, j int) { long[i], long[j] = long[j], long[i] })
			check(append(slices.Clip(long), long...))
			orders++
		}
	}
	t.Logf("%d flows, %d orders of their datagrams", len(rows), orders)
}

// TestQUICInitials sends hellos of crypto/tls in all the ways that RFC 9000 allows.
func TestQUICInitials(t *testing.T) {
	random := testseed.Rand(t)
	for name, c := range configs() {
		hello := quicHello(t, c)
		want := byServer(t, records(hello, maxFragment))
		for _, version := range []uint32{v1, v2, 0xff00001d, 0xff000017} {
			for run := range 25 {
				s := newSealer(version, randomBytes(random, random.IntN(maxCID+1)))
				datagrams := s.flight(random, hello)
				var q QUICState
				var r QUICResult
				for i, b := range datagrams {
					before := bytes.Clone(b)
					if r = q.Datagram(b); !r.More && i < len(datagrams)-1 {
						rest := q.Datagram(datagrams[i+1])
						if showQUIC(rest) != showQUIC(r) {
							t.Fatalf("%s: %s was final, then %s", name, showQUIC(r), showQUIC(rest))
						}
					}
					if !bytes.Equal(b, before) {
						t.Fatal("Datagram wrote to its input")
					}
				}
				got := show(Result{Proto: TLS, More: r.More, Hello: r.Hello})
				if r.Proto != QUIC || got != want || r.Version != version || !bytes.Equal(r.DCID, s.dcid) {
					t.Fatalf("%s, run %d: got  %s (%s)\nwant %s", name, run, got, showQUIC(r), want)
				}
				if got, tcp := r.Hello, Detect(records(hello, maxFragment)).Hello; fmt.Sprint(columns(got)) != fmt.Sprint(columns(tcp)) {
					t.Fatalf("%s: %v over QUIC, %v over TCP", name, columns(got), columns(tcp))
				}
			}
		}
	}
}

func randomBytes(random *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(random.Uint32())
	}
	return b
}

// flight puts hello into datagrams: in pieces that overlap, in any order, among other
// frames, packets and repeats.
func (s *sealer) flight(random *rand.Rand, hello []byte) (datagrams [][]byte) {
	var frames [][]byte
	for at := 0; at < len(hello); {
		n := min(len(hello)-at, 1+random.IntN(1+random.IntN(len(hello))))
		from := max(0, at-random.IntN(2)*random.IntN(20))
		frames = append(frames, cryptoFrame(from, hello[from:at+n]))
		at += n
	}
	frames = append(frames, []byte{framePing}, make([]byte, random.IntN(300)), cryptoFrame(0, nil),
		[]byte{frameAck, 5, 0, 1, 2, 0, 1}, []byte{frameAckECN, 5, 0, 0, 2, 1, 1, 1}, frames[0])
	random.Shuffle(len(frames), func(i, j int) { frames[i], frames[j] = frames[j], frames[i] })
	number, size := random.Uint32N(1<<30), 4
	if random.IntN(2) == 0 {
		number, size = 0, 1+random.IntN(4)
	}
	for len(frames) > 0 {
		var datagram []byte
		for range 1 + random.IntN(3) {
			n := 1 + random.IntN(max(len(frames), 1))
			payload := bytes.Join(frames[:min(n, len(frames))], nil)
			frames = frames[min(n, len(frames)):]
			datagram = append(datagram, s.initialLike(number, size, 0, randomBytes(random, random.IntN(2)*80), payload)...)
			number++
			if random.IntN(3) == 0 {
				datagram = append(datagram, s.opaque(QUICZeroRTT, 50)...)
			}
			if random.IntN(5) == 0 {
				datagram = append(datagram, s.opaque(QUICHandshake, 50)...)
			}
		}
		if random.IntN(4) == 0 {
			datagram = append(datagram, make([]byte, 100)...) // some pad outside of packets
		}
		datagrams = append(datagrams, datagram)
	}
	for range random.IntN(3) { // lost, and sent again
		datagrams = append(datagrams, datagrams[random.IntN(len(datagrams))])
	}
	return datagrams[:min(len(datagrams), MaxDatagrams)]
}

// helloOf is a small hello as a message.
func helloOf(name string) []byte {
	return build(nameExt(name), alpnExt("h3"), ext(extVersions, 2, 3, 4))
}

func padded(b []byte) []byte { return append(b, make([]byte, max(0, minInitial-len(b)))...) }

// TestQUICConnections goes through how connections begin, one datagram after the other.
func TestQUICConnections(t *testing.T) {
	one := newSealer(v1, []byte("original"))
	afterRetry := newSealer(v1, []byte("retried"))
	other := newSealer(v1, []byte("another"))
	second := newSealer(v2, []byte("original"))
	grease := newSealer(v1, []byte("original"))
	grease.version = 0x1a2a3a4a
	moved := newSealer(v1, []byte("original")) // has taken up the server's connection ID
	moved.dcid = []byte("srv")
	server := newSealer(v1, []byte("original")).keysFrom([]byte("original"), "server in")
	server.dcid, server.scid = one.scid, []byte("srv")
	empty := newSealer(v1, nil)

	hello := helloOf("cart")
	half := len(hello) / 2
	first, rest := cryptoFrame(0, hello[:half]), cryptoFrame(half, hello[half:])
	whole := cryptoFrame(0, hello)
	const names = " cart h3 - - 0304"
	id := func(v uint32, dcid string) string { return fmt.Sprintf(" %08x %x", v, dcid) }
	quic := "quic" + id(v1, "original")
	negotiation := []byte{0x80, 0, 0, 0, 0, 3, 1, 2, 3, 0, 0, 0, 0, 1}

	for _, tt := range []struct {
		name  string
		in    [][]byte
		want  []string // after each datagram
		last  string   // Last, after all of them
		kinds QUICPackets
	}{
		{"nothing", nil, nil, "none", 0},
		{"at once", [][]byte{one.initial(0, whole)}, []string{quic + names}, quic + names, QUICInitial},
		{"an empty DCID", [][]byte{empty.initial(0, whole)}, []string{"quic" + id(v1, "") + names}, "quic" + id(v1, "") + names, QUICInitial},
		{"in two", [][]byte{one.initial(0, first), one.initial(1, rest)}, []string{quic + " more", quic + names}, quic + names, QUICInitial},
		{"the second half first", [][]byte{one.initial(1, rest), one.initial(0, first)}, []string{quic + " more", quic + names}, quic + names, QUICInitial},
		{"the second half lost", [][]byte{one.initial(0, first)}, []string{quic + " more"}, quic, QUICInitial},
		{"coalesced", [][]byte{slices.Concat(one.opaque(QUICZeroRTT, 60), one.initial(0, rest), one.initial(1, first), one.opaque(QUICHandshake, 60), []byte("\x40short"))},
			[]string{quic + names}, quic + names, QUICInitial | QUICZeroRTT},
		{"0-RTT first", [][]byte{one.opaque(QUICZeroRTT, 900), one.initial(0, whole)}, []string{"none more", quic + names}, quic + names, QUICInitial | QUICZeroRTT},
		{"Retry", [][]byte{one.initial(0, first), append(one.start(QUICRetry, 0), "token and tag of it"...), afterRetry.initialLike(1, 1, 0, []byte("token"), rest), afterRetry.initial(2, first)},
			[]string{quic + " more", quic + " more", "quic" + id(v1, "retried") + " more", "quic" + id(v1, "retried") + names},
			"quic" + id(v1, "retried") + names, QUICInitial | QUICRetry},
		{"version negotiation", [][]byte{padded(grease.opaque(QUICInitial, 900)), negotiation, one.initial(0, whole)}, []string{"none more", "none more", quic + names},
			quic + names, QUICInitial | QUICUnknownVersion | QUICVersionNegotiation},
		{"another version after all", [][]byte{one.initial(0, first), negotiation, second.initial(0, rest), second.initial(1, first)},
			[]string{quic + " more", quic + " more", "quic" + id(v2, "original") + " more", "quic" + id(v2, "original") + names},
			"quic" + id(v2, "original") + names, QUICInitial | QUICVersionNegotiation},
		{"the server's connection ID", [][]byte{one.initial(0, first), server.initial(0, cryptoFrame(0, []byte{2, 0, 0, 0})), moved.initial(1, rest)},
			[]string{quic + " more", quic + " more", quic + names}, quic + names, QUICInitial},
		{"only the server", [][]byte{server.initial(0, cryptoFrame(0, []byte{2, 0, 0, 0}))}, []string{"none more"}, "opaque", QUICInitial},
		{"halves of two connections", [][]byte{one.initial(0, first), other.initial(0, rest)}, []string{quic + " more", "quic" + id(v1, "another") + " more"},
			"quic" + id(v1, "another"), QUICInitial},
		{"another connection ID in one datagram", [][]byte{append(one.initial(0, first), other.initial(0, whole)...)}, []string{quic + " more"}, quic, QUICInitial},
		{"two versions in one datagram", [][]byte{append(one.initial(0, first), second.initial(0, whole)...)}, []string{quic + " more"}, quic, QUICInitial},
		{"packet numbers of one byte", [][]byte{one.initialLike(200, 1, 0, nil, first), one.initialLike(260, 1, 0, nil, rest)}, []string{quic + " more", quic + names}, quic + names, QUICInitial},
		{"shown on the way", [][]byte{one.initial(0, cryptoFrame(0, hello[:len(hello)-1]))}, []string{quic + " more"}, quic + " cart h3 - - -", QUICInitial},
		{"short header later", [][]byte{one.initial(0, first), []byte("\x40short")}, []string{quic + " more", quic + " more"}, quic, QUICInitial | QUICShort},

		{"DNS", [][]byte{[]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04cart\x00\x00\x01\x00\x01")}, []string{"opaque"}, "opaque", 0},
		{"DNS with a high ID", [][]byte{[]byte("\xd2\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04cart\x00\x00\x01\x00\x01")}, []string{"opaque"}, "opaque", 0},
		{"DTLS", [][]byte{[]byte("\x16\xfe\xfd\x00\x00")}, []string{"opaque"}, "opaque", 0},
		{"short header first", [][]byte{[]byte("\x40short"), one.initial(0, whole)}, []string{"opaque", "opaque"}, "opaque", 0},
		{"cut in the header", [][]byte{{0xc0, 0, 0, 0, 1, 8, 1}}, []string{"opaque"}, "opaque", 0},
		{"one byte", [][]byte{{0xc0}}, []string{"opaque"}, "opaque", 0},
		{"empty", [][]byte{{}, one.initial(0, whole)}, []string{"none more", quic + names}, quic + names, QUICInitial},
		{"cut packet", [][]byte{one.initial(0, whole)[:60], one.initial(0, whole)}, []string{"none more", quic + names}, quic + names, QUICInitial},
		{"no room for a sample", [][]byte{append(append(one.start(QUICInitial, 0), 0, 4), 1, 2, 3, 4)}, []string{"none more"}, "opaque", QUICInitial},
		{"connection ID too long", [][]byte{padded(newSealer(v1, make([]byte, 21)).initial(0, whole))}, []string{"none more"}, "opaque", QUICInitial},
		{"tag wrong", [][]byte{func() []byte { b := one.initial(0, whole); b[len(b)-1]++; return b }(), one.initial(0, whole)}, []string{"none more", quic + names}, quic + names, QUICInitial},
		{"header wrong", [][]byte{func() []byte { b := one.initial(0, whole); b[16] ^= 1; return b }()}, []string{"none more"}, "opaque", QUICInitial},

		{"reserved bits", [][]byte{one.initialLike(0, 4, 4, nil, whole), one.initialLike(1, 4, 8, nil, whole)}, []string{"none more", "none more"}, "opaque", QUICInitial},
		{"a frame of 1-RTT", [][]byte{one.initial(0, append([]byte{0x1e}, whole...)), one.initial(1, append(slices.Clip(whole), 8, 0, 'x')), one.initial(2, whole)},
			[]string{quic + " more", quic + " more", quic + names}, quic + names, QUICInitial},
		{"frame cut", [][]byte{one.initial(0, whole[:len(whole)-1]), one.initial(1, append(slices.Clip(whole), frameAck, 1))}, []string{quic + " more", quic + " more"}, quic, QUICInitial},
		{"ACK of 2^62 ranges", [][]byte{one.initial(0, append([]byte{frameAck, 5, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0}, whole...))}, []string{quic + " more"}, quic, QUICInitial},
		{"closed", [][]byte{one.initial(0, []byte{frameConnClose, 0, 6, 2, 'n', 'o'})}, []string{quic + " more"}, quic, QUICInitial},
		{"far beyond", [][]byte{one.initial(0, append(cryptoFrame(1<<62-2, []byte("xx")), whole...)), one.initial(1, slices.Concat([]byte{frameCrypto}, varintOf(1<<61), []byte{1, 'x'})), one.initial(2, whole)},
			[]string{quic + " more", quic + " more", quic + names}, quic + names, QUICInitial},
		{"two copies that differ", [][]byte{one.initial(0, cryptoFrame(1, hello[1:])), one.initial(1, cryptoFrame(1, bytes.Repeat([]byte{9}, len(hello)))), one.initial(2, first)},
			[]string{quic + " more", quic + " more", quic + names}, quic + names, QUICInitial},
		{"no hello", [][]byte{one.initial(0, cryptoFrame(0, []byte{2, 0, 0, 90}))}, []string{quic}, quic, QUICInitial},
		{"malformed hello", [][]byte{one.initial(0, cryptoFrame(0, build(nameExt("a", "b"))))}, []string{quic}, quic, QUICInitial},
		{"varints of eight bytes", [][]byte{one.initial(0, slices.Concat([]byte{0xc0, 0, 0, 0, 0, 0, 0, frameCrypto}, varintOf(0, 8), varintOf(uint64(len(hello)), 8), hello))},
			[]string{quic + names}, quic + names, QUICInitial},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var q QUICState
			for i, b := range tt.in {
				if got := showQUIC(q.Datagram(b)); got != tt.want[i] {
					t.Errorf("after %d datagrams\ngot  %s\nwant %s", i+1, got, tt.want[i])
				}
			}
			last := q.Last()
			if got := showQUIC(last); got != tt.last || last.Packets != tt.kinds {
				t.Errorf("at last %s, packets %b\nwant    %s, packets %b", got, last.Packets, tt.last, tt.kinds)
			}
		})
	}
}

// TestQUICPacketNumbers: RFC 9000 appendix A.3.
func TestQUICPacketNumbers(t *testing.T) {
	for _, tt := range []struct {
		low     uint32
		size    int
		largest int64
		want    int64
	}{
		{0x9b32, 2, 0xa82f30ea, 0xa82f9b32}, // the example there
		{0, 1, -1, 0},
		{2, 4, -1, 2},
		{0xff, 1, -1, 0xff},
		{0x00, 1, 0xff, 0x100},
		{0xff, 1, 0x100, 0xff},
		{0x7f, 1, 0x1ff, 0x27f},
		{0x05, 1, 0x1f0, 0x205},
		{0x05, 1, 0x105, 0x105},
		{0x81, 1, 0x1ff, 0x181},
	} {
		if got := packetNumber(tt.low, tt.size, tt.largest); got != tt.want {
			t.Errorf("%x in %d bytes after %x: %x, want %x", tt.low, tt.size, tt.largest, got, tt.want)
		}
	}
}

// TestQUICBounds: no client makes a QUICState hold more than it says, or wait longer.
func TestQUICBounds(t *testing.T) {
	s := newSealer(v1, []byte("original"))
	big := build(nameExt("cart"), ext(0xff00, make([]byte, 30000)...))
	var q QUICState
	for at, n := 0, uint32(0); at < len(big) && q.Last().Proto != Unknown; at, n = at+1000, n+1 {
		r := q.Datagram(s.initial(n, cryptoFrame(at, big[at:min(at+1000, len(big))])))
		if more := at+1000 < maxCrypto; r.More != more {
			t.Fatalf("%d bytes of the stream: more %v", at+1000, r.More)
		}
		if cap(q.stream) > maxCrypto {
			t.Fatalf("%d bytes kept", cap(q.stream))
		}
	}
	if got := string(q.Last().SNI); got != "cart" {
		t.Errorf("a hello over the bound names %q", got)
	}

	// The last byte of the bound does not cost more than the bound; holes stay holes.
	q = QUICState{}
	if r := q.Datagram(s.initial(0, cryptoFrame(maxCrypto-1, []byte("xyz")))); !r.More || cap(q.stream) != maxCrypto || q.whole != 0 {
		t.Errorf("more %v, %d bytes kept, %d without a hole", r.More, cap(q.stream), q.whole)
	}

	q = QUICState{}
	for i := range MaxDatagrams {
		r := q.Datagram(s.opaque(QUICInitial, 1100))
		if last := i == MaxDatagrams-1; r.More == last || (r.Proto == Unknown) != last {
			t.Fatalf("datagram %d: %s", i+1, showQUIC(r))
		}
	}
	if q.scratch != nil {
		t.Error("the scratch space is kept after the answer")
	}
}

// TestQUICWork: a datagram of many packets that do not authenticate costs one derivation of keys.
func TestQUICWork(t *testing.T) {
	s := newSealer(v1, []byte("original"))
	one := testing.AllocsPerRun(20, func() { new(QUICState).Datagram(s.opaque(QUICInitial, 40)) })
	var many []byte
	for range 30 {
		many = append(many, s.opaque(QUICInitial, 40)...)
	}
	if all := testing.AllocsPerRun(20, func() { new(QUICState).Datagram(many) }); all > one+4 {
		t.Errorf("%v allocations for 30 packets, %v for one", all, one)
	}
}

// TestQUICAllocations: once the answer is there a datagram costs nothing, and before
// that nothing but the growth of buffers, once there are keys.
func TestQUICAllocations(t *testing.T) {
	s := newSealer(v1, []byte("original"))
	hello := helloOf("cart")
	var q QUICState
	q.Datagram(s.initial(0, cryptoFrame(1, hello[1:])))
	q.Datagram(s.initial(1, make([]byte, 1200)))
	again := s.initial(2, cryptoFrame(1, hello[1:]))
	if n := testing.AllocsPerRun(30, func() { q.Datagram(again) }); n != 0 {
		t.Errorf("%v allocations a repeat, want 0", n)
	}
	q.Datagram(s.initial(3, cryptoFrame(0, hello)))
	if n := testing.AllocsPerRun(100, func() { q.Datagram(again) }); n != 0 || string(q.Last().SNI) != "cart" {
		t.Errorf("%v allocations after the answer, want 0", n)
	}
}
