package replay

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"aether/sniff"
)

// datagram is an IP packet with a UDP datagram.
func datagram(src, dst netip.AddrPort, payload []byte) []byte {
	b := packet(src, dst, 0, 0, 0, "")
	head := 20
	if src.Addr().Is6() {
		head = 40
	}
	u := binary.BigEndian.AppendUint16(nil, src.Port())
	u = binary.BigEndian.AppendUint16(u, dst.Port())
	u = binary.BigEndian.AppendUint16(u, uint16(8+len(payload)))
	u = append(append(u, 0, 0), payload...)
	b = append(b[:head], u...)
	if head == 20 {
		b[9] = protoUDP
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	} else {
		b[6] = protoUDP
		binary.BigEndian.PutUint16(b[4:], uint16(len(u)))
	}
	return b
}

// sent are the payloads that each end of the first flow of a capture sent, in order, and
// whether it was the client.
type sent struct {
	client  bool
	payload []byte
}

func payloads(t testing.TB, path string) (all []sent) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := open(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	var client netip.AddrPort
	for {
		f, err := c.next()
		if err != nil {
			return all
		}
		if s, _ := new(decoder).decode(f.link, f.data); s != nil && s.udp {
			if len(all) == 0 {
				client = s.src
			}
			all = append(all, sent{s.src == client, bytes.Clone(s.payload)})
		}
	}
}

// TestQUIC: the hello of three datagrams is found whatever their order, however often
// they come, over IPv4 and IPv6 and in a file that starts with the server's side; of a hello that lacks
// a datagram, what is there.
func TestQUIC(t *testing.T) {
	all := payloads(t, "testdata/zeek/quic_quic-multiple-initial-fragmented-crypto.pcap")
	var client, server [][]byte
	for _, s := range all {
		if s.client {
			client = append(client, s.payload)
		} else {
			server = append(server, s.payload)
		}
	}
	if len(client) < 3 || len(server) < 1 {
		t.Fatalf("%d and %d datagrams", len(client), len(server))
	}
	hello := client[:3]
	const sni = "googleads.g.doubleclick.net"
	one := func(frames ...[]byte) Flow {
		t.Helper()
		var flows []Flow
		for f, err := range Flows(bytes.NewReader(pcap(t, layers.LinkTypeRaw, frames...))) {
			if err != nil {
				t.Fatal(err)
			}
			flows = append(flows, f)
		}
		if len(flows) != 1 {
			t.Fatalf("%d flows", len(flows))
		}
		return flows[0]
	}
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 3))
		a, b := web, cart
		if r.IntN(2) == 0 {
			a, b = web6, db6
		}
		var frames [][]byte
		for range 1 + r.IntN(3) {
			for _, h := range hello {
				frames = append(frames, datagram(a, b, h))
			}
		}
		r.Shuffle(len(frames), func(i, j int) { frames[i], frames[j] = frames[j], frames[i] })
		if r.IntN(2) == 0 {
			frames = append(frames, datagram(b, a, server[0]))
		}
		f := one(frames...)
		if f.Transport != UDP || f.Proto != sniff.QUIC || f.SNI != sni || f.Version != 1 || f.Client != a || f.First != Client || f.Incomplete || f.AnswerSegments < 3 {
			t.Fatalf("seed %d: %+v", seed, f)
		}
	}
	if f := one(datagram(cart, web, server[0]), datagram(web, cart, hello[0]), datagram(web, cart, hello[1]), datagram(web, cart, hello[2])); f.Client != web || f.SNI != sni || f.First != Server {
		t.Errorf("the server's side first: %+v", f)
	}
	if f := one(datagram(web, cart, hello[0])); f.Proto != sniff.QUIC || !f.Incomplete || f.AnswerBytes != 0 {
		t.Errorf("a part of a hello: %+v", f)
	}
	if f := one(datagram(web, cart, hello[0][:600])); f.Proto != sniff.None || !f.Incomplete || f.ClientBytes != 600 {
		t.Errorf("a packet cut short: %+v", f)
	}
	if f := one(datagram(web, cart, []byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x04cart\x00\x00\x01\x00\x01"))); f.Proto != sniff.Unknown || f.Incomplete || f.SNI != "" {
		t.Errorf("DNS: %+v", f)
	}
	if f := one(datagram(web, cart, nil)); f.Transport != UDP || f.ClientBytes != 0 {
		t.Errorf("an empty datagram: %+v", f)
	}
	cut := datagram(web, cart, []byte(strings.Repeat("x", 100)))
	if f := one(cut[:60]); f.ClientBytes != 100 {
		t.Errorf("cut by the snap length: %+v", f)
	}
}
