package registry

import (
	"math/rand/v2"
	"strings"
	"testing"

	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// The layout of contract 9.5, letter by letter.
func TestKeyText(t *testing.T) {
	cart := model.ServiceName{Namespace: "shop", Name: "cart"}
	for _, tt := range []struct {
		key  Key
		want string
	}{
		{Key{Kind: EndpointKey, Region: "eu", Cluster: "c1", Service: cart, Protocol: registrypb.Service_PROTOCOL_HTTP, IP: "10.1.0.7"},
			"/aether/v1/regions/eu/clusters/c1/ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints/10.1.0.7"},
		{Key{Kind: EndpointKey, Region: "local", Cluster: "local", Service: cart, Protocol: registrypb.Service_PROTOCOL_TCP, IP: "fd00::7"},
			"/aether/v1/regions/local/clusters/local/ns/shop/services/cart/protocols/PROTOCOL_TCP/endpoints/fd00::7"},
		{Key{Kind: EndpointKey, Region: "local", Cluster: "local", Service: cart, Protocol: registrypb.Service_PROTOCOL_UDP, IP: "10.1.0.7"},
			"/aether/v1/regions/local/clusters/local/ns/shop/services/cart/protocols/PROTOCOL_UDP/endpoints/10.1.0.7"},
		{Key{Kind: ExportKey, Region: "eu", Cluster: "c1", Service: model.ServiceName{Name: "cart"}}, "/aether/v1/regions/eu/clusters/c1/exports/cart"},
		{Key{Kind: ConfigKey, Region: "eu", Cluster: "c1", Service: cart}, "/aether/v1/regions/eu/clusters/c1/config/c2hvcC9jYXJ0"},
		{Key{Kind: ConfigKey, Region: "eu", Cluster: "c1", Service: model.ServiceName{Namespace: "a", Name: "b~?"}}, "/aether/v1/regions/eu/clusters/c1/config/YS9ifj8"},
	} {
		got, err := tt.key.Text()
		if got != tt.want || err != nil {
			t.Errorf("got  %s, %v\nwant %s", got, err, tt.want)
		}
		if back, err := ParseKey([]byte(tt.want)); back != tt.key || err != nil {
			t.Errorf("%s: %+v, %v", tt.want, back, err)
		}
	}
}

// Every other key is refused, and the error says why.
func TestParseKeyRefuses(t *testing.T) {
	const at = Root + "eu/clusters/c1/"
	for _, tt := range []struct{ key, says string }{
		{"", "not below"},
		{"/registry/pods/x", "not below"},
		{"/aether/v2/regions/eu/clusters/c1/exports/cart", "not below"},
		{Root, "not <region>/clusters"},
		{Root + "eu", "not <region>/clusters"},
		{Root + "eu/cluster/c1/exports/cart", "not <region>/clusters"},
		{Root + "/clusters/c1/exports/cart", "region is empty"},
		{Root + "eu/clusters//exports/cart", "cluster is empty"},
		{at, `"" is none of ns`},
		{at[:len(at)-1], "not <region>/clusters"},
		{at + "things/cart", `"things" is none of ns`},
		{at + "exports/", "service is empty"},
		{at + "exports/a/b", "not exports/<service>"},
		{at + "config/", "write <namespace>/<service account>"},
		{at + "config/c2hvcC9jYXJ0=", "no base64url"},
		{at + "config/c2hvcC9jYXJ0\n", "no base64url"},
		{at + "config/YS9ifj9", "no base64url"}, // bits that nobody reads are set
		{at + "config/c2hvcA", "write <namespace>/<service account>"},
		{at + "config/c2hvcC9jYXJ0/x", "not config/"},
		{at + "ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints/", `"" is no address`},
		{at + "ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints/cart-1", `"cart-1" is no address`},
		{at + "ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints/fe80::1%eth0", "is no address"},
		{at + "ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints/10.0.0.1/x", "not ns/<namespace>/"},
		{at + "ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints", "not ns/<namespace>/"},
		{at + "ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoint/10.0.0.1", "not ns/<namespace>/"},
		{at + "ns/shop/service/cart/protocols/PROTOCOL_HTTP/endpoints/10.0.0.1", "not ns/<namespace>/"},
		{at + "ns/shop/services/cart/protocol/PROTOCOL_HTTP/endpoints/10.0.0.1", "not ns/<namespace>/"},
		{at + "ns//services/cart/protocols/PROTOCOL_HTTP/endpoints/10.0.0.1", "namespace is empty"},
		{at + "ns/shop/services//protocols/PROTOCOL_HTTP/endpoints/10.0.0.1", "service is empty"},
		{at + "ns/shop/services/cart/protocols/HTTP/endpoints/10.0.0.1", `the protocol "HTTP"`},
		{at + "ns/shop/services/cart/protocols/1/endpoints/10.0.0.1", `the protocol "1"`},
		{at + "ns/shop/services/cart/protocols/PROTOCOL_UNSPECIFIED/endpoints/10.0.0.1", "PROTOCOL_UNSPECIFIED"},
		{at + "ns/shop/services/cart/protocols/PROTOCOL_QUIC/endpoints/10.0.0.1", `the protocol "PROTOCOL_QUIC"`},
		{strings.Repeat("x", 100_000), "not below"},
	} {
		_, err := ParseKey([]byte(tt.key))
		if err == nil || !strings.Contains(err.Error(), tt.says) || len(err.Error()) > 1000 {
			t.Errorf("%.200s: %v, want %s", tt.key, err, tt.says)
		}
	}
}

// A key that cannot be written is not written in another's place.
func TestKeyTextRefuses(t *testing.T) {
	good := Key{Kind: EndpointKey, Region: "eu", Cluster: "c1", Service: model.ServiceName{Namespace: "shop", Name: "cart"},
		Protocol: registrypb.Service_PROTOCOL_HTTP, IP: "10.1.0.7"}
	for name, spoil := range map[string]func(*Key){
		"no kind": func(k *Key) { k.Kind = 0 }, "region": func(k *Key) { k.Region = "" }, "slash": func(k *Key) { k.Cluster = "a/b" },
		"namespace": func(k *Key) { k.Service.Namespace = "" }, "service": func(k *Key) { k.Service.Name = "a/b" },
		"protocol": func(k *Key) { k.Protocol = 0 }, "newer protocol": func(k *Key) { k.Protocol = 4 }, "address": func(k *Key) { k.IP = "x" },
	} {
		k := good
		spoil(&k)
		if text, err := k.Text(); err == nil {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// Whatever can be written is read as it was.
func TestKeyRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 5))
	letters := []rune("abcz09-._~ %\\\"ü\x00\n")
	part := func() string {
		b := make([]rune, 1+r.IntN(6))
		for i := range b {
			b[i] = letters[r.IntN(len(letters))]
		}
		return string(b)
	}
	for range 5000 {
		k := Key{Kind: EndpointKey + KeyKind(r.IntN(3)), Region: part(), Cluster: part(), Service: model.ServiceName{Name: part()}}
		if k.Kind != ExportKey {
			k.Service.Namespace = part()
		}
		if k.Kind == EndpointKey {
			k.Protocol, k.IP = registrypb.Service_Protocol(1+r.IntN(3)), []string{"10.0.0.1", "fd00::1", "::ffff:10.0.0.1"}[r.IntN(3)]
		}
		text, err := k.Text()
		if err != nil {
			t.Fatalf("%+v: %v", k, err)
		}
		if got, err := ParseKey([]byte(text)); got != k || err != nil {
			t.Fatalf("%q: %+v, %v", text, got, err)
		}
	}
}

// A key that is read is the only one that means what it says.
func FuzzParseKey(f *testing.F) {
	f.Add([]byte("/aether/v1/regions/eu/clusters/c1/ns/shop/services/cart/protocols/PROTOCOL_HTTP/endpoints/10.1.0.7"))
	f.Add([]byte("/aether/v1/regions/local/clusters/local/ns/a/services/b/protocols/PROTOCOL_UDP/endpoints/fd00::7"))
	f.Add([]byte("/aether/v1/regions/eu/clusters/c1/exports/cart"))
	f.Add([]byte("/aether/v1/regions/eu/clusters/c1/config/c2hvcC9jYXJ0"))
	f.Fuzz(func(t *testing.T, b []byte) {
		k, err := ParseKey(b)
		if err != nil {
			if k != (Key{}) {
				t.Fatalf("an error, and %+v", k)
			}
			return
		}
		if text, err := k.Text(); text != string(b) || err != nil {
			t.Fatalf("%q is read as %+v, which is %q, %v", b, k, text, err)
		}
	})
}
