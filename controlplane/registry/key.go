package registry

import (
	"encoding/base64"
	"fmt"
	"net/netip"
	"strings"

	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// Root is below what all keys of the mesh stand in a store (contract 9.5). The layout
// is frozen: regions mirror it verbatim.
const Root = "/aether/v1/regions/"

// DefaultPartition is the name of region and cluster where none is said.
const DefaultPartition = "local"

// KeyKind is what stands under a key.
type KeyKind uint8

// The kinds.
const (
	EndpointKey KeyKind = iota + 1 // a ServiceEndpoint
	ExportKey                      // a service's namespace, as text
	ConfigKey                      // a ServiceConfigProjection
)

// Key names a place in the store. Comparable.
type Key struct {
	Kind            KeyKind
	Region, Cluster string
	// Service; of an ExportKey the Name alone, for its namespace is the value.
	Service  model.ServiceName
	Protocol registrypb.Service_Protocol // of an EndpointKey
	IP       string                      // of an EndpointKey: the row's own text
}

// Key is where the row stands.
func (r *Row) Key() Key {
	return Key{Kind: EndpointKey, Region: r.Region, Cluster: r.Cluster, Service: r.Service, Protocol: r.Protocol, IP: r.IP}
}

// Text is the key as the store has it. A part that the layout cannot hold is an error.
func (k Key) Text() (string, error) {
	dir, err := partition(k.Region, k.Cluster)
	if err != nil {
		return "", err
	}
	switch k.Kind {
	case EndpointKey:
		if err := checkProtocol(k.Protocol); err != nil {
			return "", err
		}
		if err := checkIP(k.IP); err != nil {
			return "", err
		}
		dir, err := ServiceDir(k.Region, k.Cluster, k.Service)
		if err != nil {
			return "", err
		}
		return dir + k.Protocol.String() + "/endpoints/" + k.IP, nil
	case ExportKey:
		if err := checkPart("service", k.Service.Name); err != nil {
			return "", err
		}
		return dir + "exports/" + k.Service.Name, nil
	case ConfigKey:
		if err := checkService(k.Service); err != nil {
			return "", err
		}
		return dir + "config/" + config.EncodeToString([]byte(k.Service.String())), nil
	}
	return "", fmt.Errorf("no kind of key: %d", k.Kind)
}

// ServiceDir is what the keys of a service's rows begin with; what follows is a
// protocol, "/endpoints/" and an address.
func ServiceDir(region, cluster string, n model.ServiceName) (string, error) {
	dir, err := partition(region, cluster)
	if err == nil {
		err = checkService(n)
	}
	if err != nil {
		return "", err
	}
	return dir + "ns/" + n.Namespace + "/services/" + n.Name + "/protocols/", nil
}

// config is how a service's name becomes one part of a key. Strict: no two texts mean one name.
var config = base64.RawURLEncoding.Strict()

func partition(region, cluster string) (string, error) {
	if err := checkPart("region", region); err != nil {
		return "", err
	}
	if err := checkPart("cluster", cluster); err != nil {
		return "", err
	}
	return Root + region + "/clusters/" + cluster + "/", nil
}

func checkService(n model.ServiceName) error {
	if err := checkPart("namespace", n.Namespace); err != nil {
		return err
	}
	return checkPart("service", n.Name)
}

func checkPart(what, s string) error {
	switch {
	case s == "":
		return fmt.Errorf("the %s is empty", what)
	case strings.Contains(s, "/"):
		return fmt.Errorf("the %s %.64q has a / in it", what, s)
	}
	return nil
}

func checkProtocol(p registrypb.Service_Protocol) error {
	if p < registrypb.Service_PROTOCOL_HTTP || p > registrypb.Service_PROTOCOL_UDP {
		return fmt.Errorf("protocol %s: rows stand under PROTOCOL_HTTP, PROTOCOL_TCP and PROTOCOL_UDP", p)
	}
	return nil
}

func checkIP(s string) error {
	if ip, err := netip.ParseAddr(s); err != nil || ip.Zone() != "" {
		return fmt.Errorf("%.64q is no address", s)
	}
	return nil
}

// ParseKey reads a key. The error says what is wrong with it, and shows at most its
// first 256 bytes.
func ParseKey(text []byte) (Key, error) {
	k, err := parseKey(string(text))
	if err != nil {
		return Key{}, fmt.Errorf("key %.256q: %w", text, err)
	}
	return k, nil
}

func parseKey(s string) (Key, error) {
	rest, ok := strings.CutPrefix(s, Root)
	if !ok {
		return Key{}, fmt.Errorf("it is not below %s", Root)
	}
	const most = 11 + 1 // parts of the longest form, and one
	parts := strings.SplitN(rest, "/", most)
	if len(parts) < 4 || parts[1] != "clusters" {
		return Key{}, fmt.Errorf("it is not <region>/clusters/<cluster>/ and more below %s", Root)
	}
	k := Key{Region: parts[0], Cluster: parts[2]}
	if _, err := partition(k.Region, k.Cluster); err != nil {
		return Key{}, err
	}
	switch kind, tail := parts[3], parts[4:]; kind {
	case "ns":
		return k.endpoint(tail)
	case "exports":
		if len(tail) != 1 {
			return Key{}, fmt.Errorf("it is not exports/<service>")
		}
		k.Kind, k.Service.Name = ExportKey, tail[0]
		return k, checkPart("service", tail[0])
	case "config":
		if len(tail) != 1 {
			return Key{}, fmt.Errorf("it is not config/<base64url of namespace/service>")
		}
		name, err := config.DecodeString(tail[0])
		if err != nil || strings.ContainsAny(tail[0], "\r\n") { // which the decoder skips
			return Key{}, fmt.Errorf("config/%.64q is no base64url without padding", tail[0])
		}
		k.Kind = ConfigKey
		k.Service, err = ParseService(string(name))
		return k, err
	default:
		return Key{}, fmt.Errorf("%.64q is none of ns, exports and config", kind)
	}
}

// endpoint reads <ns>/services/<svc>/protocols/<protocol>/endpoints/<ip>.
func (k Key) endpoint(p []string) (Key, error) {
	if len(p) != 7 || p[1] != "services" || p[3] != "protocols" || p[5] != "endpoints" {
		return Key{}, fmt.Errorf("it is not ns/<namespace>/services/<service>/protocols/<protocol>/endpoints/<ip>")
	}
	k.Kind, k.Service, k.IP = EndpointKey, model.ServiceName{Namespace: p[0], Name: p[2]}, p[6]
	if err := checkService(k.Service); err != nil {
		return Key{}, err
	}
	n, ok := registrypb.Service_Protocol_value[p[4]]
	k.Protocol = registrypb.Service_Protocol(n)
	if !ok {
		return Key{}, fmt.Errorf("the protocol %.64q is none that this version knows", p[4])
	}
	if err := checkProtocol(k.Protocol); err != nil {
		return Key{}, err
	}
	return k, checkIP(k.IP)
}
