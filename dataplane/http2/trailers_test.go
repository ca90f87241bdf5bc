package http2

import (
	"strings"
	"testing"
)

// TestTrailersOfProxies: what only a proxy may set is in nobody's trailers, however it is spelled, at both ends.
func TestTrailersOfProxies(t *testing.T) {
	said := []string{"grpc-status", "0", "x-forwarded-client-cert", "a", "x_forwarded-client_cert", "a", "x-aether-outcome", "200;-;GET;", "x-aether-ip", "1.2.3.4",
		"x_aether_error", "b", "x-envoy-auth_partial-body", "true", "x-sum", "1"}
	t.Run("server", func(t *testing.T) {
		w := newWire(t, Config{Server: true})
		w.head(1, false, ":method", "POST", ":scheme", "http", ":path", "/", ":authority", "a")
		w.head(1, true, said...)
		w.want("1 head POST http://a/ len=-1\n1 trailers grpc-status=\"0\" x-sum=\"1\"", "")
	})
	t.Run("client", func(t *testing.T) {
		w := newWire(t, Config{})
		s, err := w.c.Open()
		if err != nil {
			t.Fatal(err)
		}
		s.WriteHead(get("/"), true)
		w.head(1, false, ":status", "200")
		w.head(1, true, said...)
		w.want("1 head 200 len=-1\n1 trailers grpc-status=\"0\" x-sum=\"1\"", "")
	})
}

// TestTrailersTooLarge: a request's trailers have a bound of their own, far below a head's; an answer's have a head's.
func TestTrailersTooLarge(t *testing.T) {
	v := strings.Repeat("v", 1000-32-1)
	for fields, ok := range map[int]bool{8: true, 9: false} {
		w := newWire(t, Config{Server: true})
		w.head(1, false, ":method", "POST", ":scheme", "http", ":path", "/", ":authority", "a")
		var kv []string
		for range fields {
			kv = append(kv, "x", v)
		}
		w.head(1, true, kv...)
		want := "1 head POST http://a/ len=-1\n1 reset PROTOCOL_ERROR"
		if ok {
			want = "1 head POST http://a/ len=-1\n1 trailers" + strings.Repeat(" x=\""+v+"\"", fields)
		}
		w.want(want, "")
		if n := w.c.Stats().TooLarge; (n == 0) != ok {
			t.Errorf("%d fields: %d counted as too large", fields, n)
		}
	}
	w := newWire(t, Config{})
	s, err := w.c.Open()
	if err != nil {
		t.Fatal(err)
	}
	s.WriteHead(get("/"), true)
	w.head(1, false, ":status", "200")
	var kv []string
	for range 50 {
		kv = append(kv, "x", v)
	}
	w.head(1, true, kv...)
	w.want("1 head 200 len=-1\n1 trailers"+strings.Repeat(" x=\""+v+"\"", 50), "")
}

// TestBlanksInTrailers: blanks around a value are taken off in trailers as in heads (decision 037), at both ends.
func TestBlanksInTrailers(t *testing.T) {
	w := newWire(t, Config{Server: true})
	w.head(1, false, ":method", "POST", ":scheme", "http", ":path", "/", ":authority", "a")
	w.head(1, true, "x-a", " b\t", "x-c", "  ")
	w.want("1 head POST http://a/ len=-1\n1 trailers x-a=\"b\" x-c=\"\"", "")
	w = newWire(t, Config{})
	s, err := w.c.Open()
	if err != nil {
		t.Fatal(err)
	}
	s.WriteHead(get("/"), true)
	w.head(1, false, ":status", "200")
	w.head(1, true, "grpc-status", " 0 ")
	w.want("1 head 200 len=-1\n1 trailers grpc-status=\"0\"", "")
}
