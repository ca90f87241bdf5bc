package gamma

import (
	"maps"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// FromAPI is an API server's object, of which only what this package reads is taken:
// what is beside spec is the server's own, and may be anything in a newer version.
func FromAPI(kind string, u map[string]any) Object {
	meta, _ := u["metadata"].(map[string]any)
	kept := map[string]any{}
	for _, k := range []string{"name", "namespace", "creationTimestamp"} {
		if v, ok := meta[k]; ok {
			kept[k] = v
		}
	}
	o := map[string]any{"metadata": kept}
	if spec, ok := u["spec"]; ok {
		o["spec"] = spec
	}
	text := func(k string) string { s, _ := kept[k].(string); return s }
	return Object{Root: tree(o), Kind: kind, Namespace: text("namespace"), Name: text("name")}
}

// tree is a decoded JSON value as the decoder walks it. It has no lines.
func tree(v any) *yaml.Node {
	scalar := func(tag, text string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text} }
	switch v := v.(type) {
	case map[string]any:
		n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Content: make([]*yaml.Node, 0, 2*len(v))}
		for _, k := range slices.Sorted(maps.Keys(v)) {
			n.Content = append(n.Content, scalar("!!str", k), tree(v[k]))
		}
		return n
	case []any:
		n := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Content: make([]*yaml.Node, 0, len(v))}
		for _, e := range v {
			n.Content = append(n.Content, tree(e))
		}
		return n
	case string:
		return scalar("!!str", v)
	case bool:
		return scalar("!!bool", strconv.FormatBool(v))
	case int64:
		return scalar("!!int", strconv.FormatInt(v, 10))
	case float64:
		return scalar("!!float", strconv.FormatFloat(v, 'g', -1, 64))
	}
	return scalar("!!null", "null")
}
